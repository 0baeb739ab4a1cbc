"""Start jobs beside a broker, pass their output on, and end everything whatever happens."""
