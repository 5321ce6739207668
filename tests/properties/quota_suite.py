"""What any FlowAccount must hold, as checks that take a class: run on the real one, and on mutants of it.

The oracle counts in fractions beside the account: what was debited, what came back, what a full bucket turned away.
"""

from __future__ import annotations

import random
from fractions import Fraction

from manylora_shared.tenancy.quota import NANOS, FlowAccount, TokenBucket

Account = type[FlowAccount[int]]


class Oracle:
    """Drives one account at random and compares it with plain arithmetic after every step."""

    def __init__(self, kind: Account, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rate = self.rng.choice([1, 3, 7, 50, 999])
        self.burst = self.rng.choice([1, 10, 64, 500])
        self.begin = self.rng.randint(0, self.burst)
        self.now_ns = self.rng.randrange(10**12)
        self.account: FlowAccount[int] = kind(TokenBucket(self.rate, self.burst, self.now_ns, level=self.begin))
        self.began_ns = self.now_ns
        self.level = Fraction(self.begin)
        self.leases: dict[int, list[int]] = {}
        """Granted and used tokens."""
        self.used = 0
        self.written_off = 0
        self.next_key = 0
        self.debts = 0

    def run(self, num_actions: int) -> None:
        for _ in range(num_actions):
            self.rng.choice(
                [self.wait, self.wait, self.open, self.open, self.use, self.use, self.extend, self.settle]
            )()
            if self.rng.random() < 0.03:
                self.lose()
            self.check()
        for key in list(self.leases):
            self._settle(key)
            self.check()
        assert len(self.account) == 0
        assert self.account.leased_tokens == 0
        assert self.account.pending_tokens == 0
        assert self.account.settled_tokens == self.used - self.written_off

    def wait(self) -> None:
        self._pass(self.rng.choice([1, 10**6, 10**8, 10**9, self.rng.randrange(10**10)]))

    def _pass(self, ns: int) -> None:
        self.now_ns += ns
        self.level = min(Fraction(self.burst), self.level + Fraction(self.rate * ns, NANOS))
        self._serve()

    def open(self) -> None:
        tokens = self.rng.randint(1, self.burst + self.burst // 4 + 1)
        wait_ns = self.account.wait_ns(tokens, self.now_ns)
        if tokens > self.burst:
            assert wait_ns is None, "a lease larger than the bucket can never be cut"
            return
        assert wait_ns is not None
        assert (wait_ns == 0) == (self.level >= tokens + self.account.pending_tokens), "the hint follows the level"
        if wait_ns and not self.account.pending_tokens and self.rng.random() < 0.5:
            # The hint is exact: a nanosecond earlier it is not enough.
            self._pass(wait_ns - 1)
            assert self.account.wait_ns(tokens, self.now_ns) == 1
            self._pass(1)
            wait_ns = self.account.wait_ns(tokens, self.now_ns)
            assert wait_ns == 0
        if wait_ns == 0:
            self.account.open(self.next_key, tokens, self.now_ns)
            self.level -= tokens
            self.leases[self.next_key] = [tokens, 0]
            self.next_key += 1

    def use(self) -> None:
        if self.leases:
            lease = self.leases[self.rng.choice(list(self.leases))]
            tokens = self.rng.randint(0, lease[0] - lease[1])
            lease[1] += tokens
            self.used += tokens

    def extend(self) -> None:
        if self.leases:
            self.account.extend(self.rng.choice(list(self.leases)), self.rng.randint(1, self.burst))
            self._serve()

    def _serve(self) -> None:
        for key in self.account.serve(self.now_ns):
            tokens = self.account.tokens_of(key)
            assert tokens is not None
            grown = tokens - self.leases[key][0]
            assert grown >= 1
            self.level -= grown
            self.leases[key][0] = tokens

    def settle(self) -> None:
        if self.leases:
            self._settle(self.rng.choice(list(self.leases)))

    def _settle(self, key: int) -> None:
        granted, used = self.leases.pop(key)
        self.account.settle(key, used, self.now_ns)
        self.level = min(Fraction(self.burst), self.level + granted - used)
        self._serve()

    def lose(self) -> None:
        """The holder vanishes, and may have used everything."""
        if self.leases:
            key = self.rng.choice(list(self.leases))
            granted, used = self.leases.pop(key)
            self.written_off += granted
            self.used += granted - used
            self.account.write_off(key)

    def check(self) -> None:
        bucket = self.account.bucket
        assert bucket is not None
        assert bucket.level(self.now_ns) == self.level.numerator // self.level.denominator, "tokens appear or vanish"
        leased = sum(granted for granted, _ in self.leases.values())
        assert self.account.leased_tokens == leased
        elapsed = Fraction(self.now_ns - self.began_ns, NANOS)
        unused = sum(granted - used for granted, used in self.leases.values())
        assert self.used + unused <= self.begin + self.rate * elapsed, "more was leased than the contract gives"
        assert self.level >= 0


def run_suite(kind: Account, seeds: range) -> None:
    for seed in seeds:
        Oracle(kind, seed).run(60)
    taken_over_leases_return_nothing_to_another_bucket(kind)
    extensions_come_before_new_leases(kind)
    overuse_is_repaid(kind)


def taken_over_leases_return_nothing_to_another_bucket(kind: Account) -> None:
    account = kind(TokenBucket(10, 100, 0, level=20))
    account.take_over(1, 50)
    assert account.leased_tokens == 50
    account.extend(1, 10)
    assert account.serve(0) == [1]
    assert account.bucket is not None
    assert (account.tokens_of(1), account.bucket.level(0)) == (60, 10)
    account.settle(1, 5, 0)
    assert account.bucket.level(0) == 20, "only what this bucket gave comes back to it"
    account.take_over(2, 50)
    account.settle(2, 45, 0)
    assert account.bucket.level(0) == 20


def extensions_come_before_new_leases(kind: Account) -> None:
    account = kind(TokenBucket(10, 100, 0, level=10))
    account.open(1, 10, 0)
    account.extend(1, 30)
    assert account.serve(0) == []
    assert account.next_service_ns(0) == 3 * NANOS
    assert account.wait_ns(5, 0) == 35 * NANOS // 10
    assert account.wait_ns(90, 0) == 12 * NANOS
    assert account.wait_ns(5, 3 * NANOS) != 0
    assert account.serve(3 * NANOS) == [1]
    assert account.wait_ns(5, 3 * NANOS) == NANOS // 2


def overuse_is_repaid(kind: Account) -> None:
    account = kind(TokenBucket(10, 100, 0, level=10))
    account.open(1, 10, 0)
    account.settle(1, 30, 0)
    assert account.settled_tokens == 30
    assert account.wait_ns(1, 0) == 21 * NANOS // 10
