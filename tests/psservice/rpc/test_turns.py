"""Turns of the event loop: in order, a few a round, and none for who has gone."""

import asyncio

from psservice.rpc.turns import Turns


def test_turns_go_round_in_order_and_others_come_between():
    async def main():
        turns, seen = Turns(2), []

        async def reader(name):
            await turns.take()
            seen.append(name)

        readers = [asyncio.ensure_future(reader(number)) for number in range(6)]
        for _ in range(8):
            await asyncio.sleep(0)
            seen.append("round")
        await asyncio.gather(*readers)
        return seen

    seen = asyncio.run(main())
    assert [each for each in seen if each != "round"] == [0, 1, 2, 3, 4, 5]
    assert " ".join(map(str, seen)).strip("round ") == "0 1 round 2 3 round 4 5"


def test_who_has_gone_takes_no_turn():
    async def main():
        turns, seen = Turns(1), []

        async def reader(name):
            await turns.take()
            seen.append(name)

        readers = [asyncio.ensure_future(reader(number)) for number in range(4)]
        await asyncio.sleep(0)
        readers[0].cancel()
        readers[2].cancel()
        await asyncio.wait(readers)
        await turns.take()
        return seen

    assert asyncio.run(main()) == [1, 3]
