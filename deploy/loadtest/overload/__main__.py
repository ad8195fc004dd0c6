"""`python -m deploy.loadtest.overload`."""

import sys

from deploy.loadtest.overload.bench import main

if __name__ == "__main__":
    main(sys.argv[1:])
