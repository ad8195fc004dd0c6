"""Manager and eviction policies against slow, simple models, over random operations."""

import random
from collections.abc import Collection

import pytest

from engine_core.kv_connector.offload.cpu_manager import CPUOffloadingManager
from engine_core.kv_connector.offload.eviction import ARCPolicy, LRUPolicy, OffloadedBlock

NUM_KEYS = 12
KEYS = [bytes([number]) for number in range(NUM_KEYS)]


class ModelPolicy:
    """Reference policy: plain lists, oldest first, searched linearly."""

    def __init__(self, capacity: int, adaptive: bool) -> None:
        self.capacity = capacity
        self.adaptive = adaptive
        self.once: list[bytes] = []
        self.often: list[bytes] = []
        self.ghosts: dict[bool, list[bytes]] = {True: [], False: []}
        self.target = 0.0
        self.busy: set[bytes] = set()

    def insert(self, key: bytes) -> None:
        was_ghost = any(key in each for each in self.ghosts.values())
        for each in self.ghosts.values():
            if key in each:
                each.remove(key)
        (self.often if was_ghost and self.adaptive else self.once).append(key)

    def remove(self, key: bytes) -> None:
        (self.once if key in self.once else self.often).remove(key)

    def touch(self, keys: list[bytes], is_new_use: bool) -> None:
        for key in keys[::-1]:
            if key in self.often:
                self.often.remove(key)
                self.often.append(key)
            elif key in self.once:
                self.once.remove(key)
                (self.often if is_new_use and self.adaptive else self.once).append(key)
            elif is_new_use and self.adaptive:
                self.learn(key)

    def learn(self, key: bytes) -> None:
        once, often = self.ghosts[True], self.ghosts[False]
        if key in once:
            self.target = min(self.capacity, self.target + max(1, len(often) / len(once)))
            once.append(once.pop(once.index(key)))
        elif key in often:
            self.target = max(0, self.target - max(1, len(once) / len(often)))
            often.append(often.pop(often.index(key)))

    def evict(self, count: int, protected: Collection[bytes]) -> list[bytes] | None:
        once = [key for key in self.once if key not in protected and key not in self.busy]
        often = [key for key in self.often if key not in protected and key not in self.busy]
        if len(once) + len(often) < count:
            return None
        victims = []
        for _ in range(count):
            long_enough = not self.adaptive or len(self.once) >= max(1, int(self.target))
            from_once = bool(once) and (long_enough or not often)
            victim = (once if from_once else often).pop(0)
            self.remove(victim)
            victims.append(victim)
            if self.adaptive:
                ghosts = self.ghosts[from_once]
                ghosts.append(victim)
                del ghosts[: -self.capacity]
        return victims


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_eviction_policies_agree_with_a_model(adaptive: bool, seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randint(1, 6)
    policy = ARCPolicy(capacity) if adaptive else LRUPolicy()
    model = ModelPolicy(capacity, adaptive)
    for _ in range(300):
        here = sorted(policy)
        assert here == sorted(model.once + model.often)
        action = rng.random()
        if action < 0.35:
            touched = rng.sample(KEYS, rng.randint(1, 4))
            is_new_use = rng.random() < 0.7
            policy.touch(touched, is_new_use)
            model.touch(touched, is_new_use)
        elif action < 0.45 and here:
            gone = rng.choice(here)
            policy.remove(gone)
            model.remove(gone)
            model.busy.discard(gone)
        elif action < 0.6 and here:
            chosen = rng.choice(here)
            block = policy.get(chosen)
            assert block is not None
            block.num_readers = rng.choice([-1, 0, 0, 0, 1])
            (model.busy.discard if block.is_idle else model.busy.add)(chosen)
        else:
            new = rng.choice(KEYS)
            if policy.get(new) is not None:
                continue
            protected = set(rng.sample(KEYS, 2))
            missing = len(here) + 1 - capacity
            if missing > 0:
                victims = policy.evict(missing, protected)
                expected = model.evict(missing, protected)
                assert (None if victims is None else [each.key for each in victims]) == expected
                if victims is None:
                    continue
            policy.insert(new, OffloadedBlock(0))
            model.insert(new)
            model.busy.add(new)
        if isinstance(policy, ARCPolicy):
            assert policy.target == pytest.approx(model.target)
            assert 0 <= policy.target <= capacity
            assert list(policy.once_ghosts) == model.ghosts[True]
            assert list(policy.often_ghosts) == model.ghosts[False]


@pytest.mark.parametrize("name", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(4))
def test_the_ledger_agrees_with_a_model(name: str, seed: int) -> None:
    """Block states and slots match the model, and the events add up to the present blocks."""
    rng = random.Random(seed)
    capacity = rng.randint(1, 6)
    policy = ARCPolicy(capacity) if name == "arc" else LRUPolicy()
    ledger = CPUOffloadingManager(capacity, policy)
    slots: dict[bytes, int] = {}
    readers: dict[bytes, int] = {}
    bad: set[bytes] = set()
    announced: set[bytes] = set()
    for _ in range(400):
        action = rng.random()
        chosen = rng.sample(KEYS, rng.randint(1, 4))
        present = [key for key, count in readers.items() if count >= 0 and key not in bad]
        if action < 0.4:
            output = ledger.prepare_store(chosen)
            new = [key for key in chosen if key not in slots]
            idle = [key for key, count in readers.items() if count == 0 and key not in chosen]
            missing = max(0, len(new) - (capacity - len(slots)))
            assert (output is None) == (missing > len(idle))
            if output is None:
                continue
            assert output.keys == new
            assert len(output.evicted) == missing
            assert set(output.evicted) <= set(idle)
            for key in output.evicted:
                del slots[key], readers[key]
            slots |= dict(zip(new, output.slots, strict=True))
            readers |= dict.fromkeys(new, -1)
        elif action < 0.6:
            stored = [key for key, count in readers.items() if count == -1][:2]
            success = rng.random() < 0.8
            ledger.complete_store(stored, success=success)
            for key in stored:
                readers[key] = 0
                if not success:
                    del slots[key], readers[key]
        elif action < 0.75 and present:
            loaded = rng.sample(present, rng.randint(1, len(present)))
            assert ledger.prepare_load(loaded) == [slots[key] for key in loaded]
            for key in loaded:
                readers[key] += 1
        elif action < 0.9:
            loaded = [key for key, count in readers.items() if count > 0][:2]
            success = rng.random() < 0.8
            ledger.complete_load(loaded, success=success)
            for key in loaded:
                readers[key] -= 1
                if not success:
                    bad.add(key)
                if key in bad and not readers[key]:
                    bad.discard(key)
                    del slots[key], readers[key]
        else:
            ledger.touch(chosen, is_new_use=rng.random() < 0.5)
        held = list(slots.values())
        assert len(set(held)) == len(held) <= capacity
        assert all(0 <= slot < capacity for slot in held)
        ready = {key for key, count in readers.items() if count >= 0 and key not in bad}
        assert ledger.contains(KEYS) == [key in ready for key in KEYS]
        for event in ledger.take_events():
            if event.removed:
                assert announced >= set(event.keys)
                announced -= set(event.keys)
            else:
                assert not announced & set(event.keys)
                announced |= set(event.keys)
        assert announced == {key for key, count in readers.items() if count >= 0}
