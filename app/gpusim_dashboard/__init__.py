"""What the dashboard's pages share. Numbers and figures come from gpusim; here is what a page needs around them."""
