"""Results for people: tables on a terminal and HTML reports."""
