"""Code shared by the dashboard's pages. Numbers and figures come from gpusim."""
