"""What people look at: tables, figures and timelines made from results, never the results themselves."""
