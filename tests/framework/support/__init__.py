"""Of the tests with frameworks: the scripts that are started, which import each other by their names alone."""
