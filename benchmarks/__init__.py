"""Side-by-side timings."""
