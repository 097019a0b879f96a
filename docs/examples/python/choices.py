"""Several whole answers to one text, each with its log-probability, and one of them again.

    python choices.py "The quick brown fox"

OUTRIDER_ADDRESS and OUTRIDER_API_KEY as in ask.py.
"""

import asyncio
import os
import sys

from outrider.client import Client


async def main(text: str) -> None:
    address = os.environ.get("OUTRIDER_ADDRESS", "127.0.0.1:50051")
    async with Client(address, api_key=os.environ.get("OUTRIDER_API_KEY")) as client:
        answer = await client.generate(text, n=3, temperature=0.8, max_tokens=16, logprobs=0)
        for choice in answer.choices:
            total = sum(token.logprob or 0.0 for token in choice.tokens)
            print(f"{total:8.2f}  seed {choice.finish.seed:<20}  {choice.text!r}")
        # A seed means one text, whatever the drafts were.
        last = answer.choices[-1]
        again = await client.generate(
            text, temperature=0.8, max_tokens=16, seed=last.finish.seed, speculation="off"
        )
        print("the last one again:", "same text" if again.text == last.text else "another text")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "The quick brown fox"))
