"""Python calls of a front end for a request, counted on its event loop.

Other work of the loop only adds to them, so the least of several requests is taken.
"""

from collections import Counter

from tests.api_server.conftest import FrontEnd, StartFrontEnd
from tests.python_calls import check_calls, counted_calls, same_version

pytestmark = same_version
ROUNDS = 8
TOKENS = range(10, 18)


async def least_calls_of_stream(front_end: FrontEnd, num_tokens: int) -> Counter[str]:
    found = []
    for _ in range(ROUNDS):
        with counted_calls() as calls:
            await front_end.one_by_one(TOKENS[:num_tokens], temperature=0, max_tokens=9)
        found.append(calls)
    return min(found, key=Counter.total)


async def test_a_completion(start: StartFrontEnd) -> None:
    async with start(script=lambda request, choice: TOKENS) as front_end:
        found = []
        for _ in range(ROUNDS):
            with counted_calls() as calls:
                response = await front_end.complete(max_tokens=len(TOKENS), temperature=0)
            assert response.status_code == 200
            found.append(calls)
    check_calls("front end: a completion", min(found, key=Counter.total))


async def test_a_stream(start: StartFrontEnd) -> None:
    async with start(accepts=True) as front_end:
        short = await least_calls_of_stream(front_end, 2)
        long = await least_calls_of_stream(front_end, 8)
    check_calls("front end: a streamed completion", long)
    more = Counter({name: -(-count // 6) for name, count in (long - short).items()})
    check_calls("front end: one more token of a stream", more)
