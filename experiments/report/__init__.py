"""Reports: one offline HTML page that a planner can read, keep and print."""
