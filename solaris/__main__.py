"""`python -m solaris` is `solaris`."""

from solaris.cli import main

main()
