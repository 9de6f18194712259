"""The dashboard's entry: `gpusim app` starts Streamlit on this file."""

from gpusim_dashboard.frame import main

main()
