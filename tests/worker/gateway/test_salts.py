"""Cache salts: one per tenant, the same at every gateway with its key, known to nobody else."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.image_files import ask
from worker.gateway.stack import P_D, serving, stack
from worker.gateway.test_front_door import api

from vlm_worker.gateway.config import ApiKeys, Salts, cache_salt, load_keys

NAMES = st.text(min_size=1, max_size=40)
SECRETS = st.binary(min_size=1, max_size=64)


def keys_of(directory: Path, **keys: str) -> ApiKeys:
    directory.mkdir()
    for tenant, key in keys.items():
        (directory / tenant).write_text(f"{key}\n")
    found, refused = load_keys(directory)
    assert not refused
    return found


def of_names_alone(served_name: str, tenant: str) -> bytes:
    """What the first release sent, and what an attacker who knows both names can compute."""
    framed = b"".join(
        len(part).to_bytes(4, "little") + part
        for part in (b"triptych/cache-salt/1", served_name.encode(), tenant.encode())
    )
    return hashlib.sha256(framed).digest()


@given(NAMES, NAMES, SECRETS, SECRETS)
def test_a_salt_follows_from_names_and_secret_together(
    served_name: str, tenant: str, one: bytes, other: bytes
) -> None:
    salt = cache_salt(one, served_name, tenant)
    assert len(salt) == 32
    assert salt == cache_salt(one, served_name, tenant)
    if one.rstrip(b"\0") != other.rstrip(b"\0"):  # HMAC pads a key with zeros
        assert salt != cache_salt(other, served_name, tenant)
    assert salt != of_names_alone(served_name, tenant)


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES), SECRETS)
def test_no_two_tenants_or_models_share_a_salt(
    one: tuple[str, str], other: tuple[str, str], secret: bytes
) -> None:
    assert (cache_salt(secret, *one) == cache_salt(secret, *other)) == (one == other)


def test_gateways_with_the_same_key_agree_and_others_do_not(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "one", alice="a-key", bob="b-key")
    rotated = keys_of(tmp_path / "two", alice="a-new-key", bob="b-key")
    one, same, new = (Salts("m", lambda k=k: k) for k in (keys, keys, rotated))  # type: ignore[misc]
    assert one.of("alice") == same.of("alice")
    assert one.of("bob") == same.of("bob") == new.of("bob")
    assert len({one.of("alice"), new.of("alice"), one.of("bob")}) == 3
    assert Salts("other", lambda: keys).of("alice") != one.of("alice")


def test_tenants_with_one_key_between_them_share_nothing(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "one", alice="key", bob="key")
    salts = Salts("m", lambda: keys)
    assert salts.of("alice") != salts.of("bob")


def test_without_keys_each_process_has_a_salt_of_its_own() -> None:
    """Nothing that a gateway of an open service sends can be computed from names."""
    one, other = (Salts("m", lambda: None) for _ in range(2))
    assert one.of("") == one.of("")
    assert one.of("") != other.of("")
    assert one.of("") != of_names_alone("m", "")


def test_what_is_kept_for_the_comparison_does_not_give_the_salt(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "one", alice="a-key")
    [key] = keys.by_tenant
    salt = Salts("m", lambda: keys).of("alice")
    assert salt == cache_salt(key.secret, "m", "alice")
    assert salt != cache_salt(key.digest, "m", "alice")
    assert key.secret != key.digest
    assert hmac.compare_digest(key.digest, hashlib.sha256(b"a-key").digest())
    assert key.secret.hex() not in repr(keys)
    assert repr(key.secret) not in repr(keys)


async def test_the_same_tenant_shares_its_prefix_across_two_gateways(tmp_path: Path) -> None:
    keys_of(tmp_path / "keys", alice="alice-key", bob="bob-key")
    messages = [ask("the same long beginning of a prompt that fills several blocks")]
    cached = []
    async with (
        stack(*P_D, api_keys_dir=tmp_path / "keys") as first,
        serving(first.gateway.context.settings) as second,
    ):
        for url, key in (
            (first.url, "alice-key"),
            (second.url, "bob-key"),
            (second.url, "alice-key"),
        ):
            async with api(url, key) as client:
                answer = await client.chat.completions.create(
                    model="shapes", messages=messages, max_tokens=2
                )
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[1] == 0
    assert cached[2] > 0


def test_keys_of_one_tenant_are_all_valid_and_the_first_gives_the_salt(tmp_path: Path) -> None:
    """A rotation: the old key, both, the new one. The caches stay until the old key is removed."""
    one, two = "the-old-key-of-alice", "the-new-key-of-alice"
    old = keys_of(tmp_path / "old", alice=one, bob="b-key")
    both = keys_of(tmp_path / "both", alice=f"{one}\r\n\n {two} ", bob="b-key")
    new = keys_of(tmp_path / "new", alice=two, bob="b-key")
    valid = [
        [keys.tenant_of(f"Bearer {key}") for key in (one, two, "b-key", f"{one}\n")]
        for keys in (old, both, new)
    ]
    assert valid == [
        ["alice", None, "bob", "alice"],
        ["alice", "alice", "bob", "alice"],
        [None, "alice", "bob", None],
    ]
    assert both.tenants == old.tenants == ("alice", "bob")
    salts = [Salts("m", lambda k=k: k).of("alice") for k in (old, both, new)]  # type: ignore[misc]
    assert salts[0] == salts[1] != salts[2]
