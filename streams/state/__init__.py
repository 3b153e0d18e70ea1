"""The store contract, its two implementations, and what a partition's directory says about itself."""
