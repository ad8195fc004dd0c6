"""`python -m tests.fuzz TARGET --minutes 10`: run a fuzzing campaign and extend its corpus.

Exit status 1 if there are findings, which are printed with their inputs in hex.
"""

import argparse
import logging
import sys
import time

from tests.fuzz.campaign import Campaign, limit_memory
from tests.fuzz.targets import TARGETS


def main() -> int:
    logging.disable(logging.CRITICAL)
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--keep", action="store_true", help="add what is new to the corpus")
    arguments = parser.parse_args()
    target = TARGETS[arguments.target]()
    campaign = Campaign(target)
    campaign.replay()
    limit_memory()
    start = time.monotonic()
    campaign.run(arguments.minutes * 60)
    seconds = time.monotonic() - start
    target.close()
    kept = f", corpus {campaign.keep()}" if arguments.keep else ""
    print(
        f"{target.name}: {campaign.num_inputs} inputs in {seconds:.0f} s, "
        f"{len(campaign.findings)} findings{kept}"
    )
    for place, (data, trace) in campaign.findings.items():
        print(f"\n{place}\n{trace}input: {data[:4000].hex()}")
    return 1 if campaign.findings else 0


if __name__ == "__main__":
    sys.exit(main())
