"""Of the tests with processes: brokers, drivers, and the scripts that are started."""
