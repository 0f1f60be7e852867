"""All benchmarks that a machine can run, one after the other, and the page that they make."""
