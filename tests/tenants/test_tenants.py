"""Names of tenants, and what a tenants file may say."""

from __future__ import annotations

import re

import pytest

from kvpool.errors import ConfigError, UsageError
from kvpool.tenant_names import marker_of, qualified, tenant_of, unqualified
from kvpool.tenants import WHOLE, Share, Tenant, check_fit, parse_tenants


@pytest.mark.parametrize(
    ("name", "tenant"),
    [
        ("@acme/llama", "acme"),
        ("@acme/", "acme"),
        ("@a-1/@blue/x", "a-1"),
        (f"@{'a' * 32}/x", "a" * 32),
        ("llama", ""),
        ("", ""),
        ("@acme", ""),
        ("@/x", ""),
        ("@ACME/x", ""),
        ("@-acme/x", ""),
        ("@ac me/x", ""),
        (f"@{'a' * 33}/x", ""),
        (" @acme/x", ""),
        ("x@acme/x", ""),
        ("@acme\n/x", ""),
    ],
)
def test_the_tenant_of_a_name(name: str, tenant: str) -> None:
    assert tenant_of(name) == tenant


def test_a_name_is_marked_and_unmarked() -> None:
    assert qualified("acme", "llama") == "@acme/llama"
    assert unqualified("acme", "@acme/llama") == "llama"
    assert qualified("", "llama") == unqualified("", "llama") == "llama"
    assert marker_of("") == ""
    # A user's name that looks marked is one more name of its tenant.
    assert tenant_of(qualified("acme", "@blue/llama")) == "acme"
    for foreign in ("@acm/llama", "@acme2/llama", "llama", "@acme"):
        with pytest.raises(UsageError, match="does not belong to tenant 'acme'"):
            unqualified("acme", foreign)


def entry(**settings: object) -> dict[str, object]:
    return {"name": "acme", "secret_file": "acme.secret", **settings}


def parsed(*entries: object) -> dict[str, Tenant]:
    return parse_tenants({"tenants": list(entries)}, "t.yaml")


def test_what_a_file_says() -> None:
    tenants = parsed(
        entry(guaranteed="25%", limit="64GiB", rate="500MiB"),
        {"name": "blue-2", "secret_file": ["old", "new"], "guaranteed": "8GiB"},
    )
    assert tenants == {
        "acme": Tenant("acme", ("acme.secret",), Share(percent=25.0), Share(64 << 30), 500 << 20),
        "blue-2": Tenant("blue-2", ("old", "new"), Share(8 << 30), WHOLE, 0),
    }
    assert parsed() == {}


def test_a_share_is_of_each_tier() -> None:
    assert Share(percent=25.0).of(1000) == 250
    assert Share(300).of(1000) == 300
    assert Share(3000).of(1000) == 1000
    assert WHOLE.of(1000) == 1000
    assert (str(Share(percent=12.5)), str(Share(64 << 30))) == ("12.5%", "64 GiB")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (None, "got nothing, expected one list: `tenants:`"),
        ("s3cret:x:0", "got str, expected one list"),
        ([], "expected one list"),
        ({"tenant": []}, "got tenant, expected one list"),
        ({"tenants": [], "more": 1}, "got more, tenants, expected one list"),
        ({"tenants": {"acme": {}}}, "is no list of at most 1024 tenants"),
        ({"tenants": [{}] * 1025}, "is no list of at most 1024 tenants"),
        ({"tenants": ["acme"]}, "tenant 1: got 'acme', expected settings: name, secret_file"),
        ({"tenants": [entry(quota=1)]}, "'acme': unknown setting 'quota', expected one of: name,"),
        ({"tenants": [{"name": "acme"}]}, "tenant 'acme': .*missing required field `secret_file`"),
        ({"tenants": [{"secret_file": "f"}]}, "tenant 1: .*missing required field `name`"),
        ({"tenants": [entry(name=7)]}, "tenant 7: Expected `str`, got `int`"),
        ({"tenants": [entry(name="Acme")]}, "name 'Acme', expected 1 to 32 lower-case letters"),
        ({"tenants": [entry(name="a/b")]}, "name 'a/b', expected 1 to 32 lower-case letters"),
        ({"tenants": [entry(name="")]}, "name '', expected 1 to 32"),
        ({"tenants": [entry(), entry()]}, "tenant 'acme' is there twice"),
        ({"tenants": [entry(secret_file="")]}, "secret_file '', expected the path of a file"),
        ({"tenants": [entry(secret_file=["a", "a"])]}, "a list of at most 2 different ones"),
        ({"tenants": [entry(secret_file=["a", "b", "c"])]}, "length <= 2"),
        ({"tenants": [entry(secret_file=[])]}, "length >= 1"),
        ({"tenants": [entry(guaranteed=True)]}, "got `bool`"),
        ({"tenants": [entry(guaranteed="64GB")]}, "guaranteed: size '64GB': unit 'GB' is not one"),
        ({"tenants": [entry(guaranteed="101%")]}, "guaranteed '101%', expected 0% to 100%"),
        ({"tenants": [entry(limit="nan%")]}, "limit 'nan%', expected 0% to 100%"),
        ({"tenants": [entry(limit="x%")]}, "limit 'x%', expected 0% to 100%"),
        ({"tenants": [entry(limit=-1)]}, "limit: size -1 is negative; or a percentage"),
        ({"tenants": [entry(limit=0)]}, "limit 0, expected more than nothing"),
        ({"tenants": [entry(rate="1GB/s")]}, "rate: .*bytes per second"),
        (
            {"tenants": [entry(guaranteed="3GiB", limit="2GiB")]},
            "guaranteed '3GiB' is more than the limit '2GiB'",
        ),
        (
            {"tenants": [entry(guaranteed="30%", limit="20%")]},
            "guaranteed '30%' is more than the limit '20%'",
        ),
        (
            {"tenants": [entry(guaranteed="60%"), entry(name="blue", guaranteed="40.1%")]},
            "the guaranteed shares are 100.1% together, expected at most 100%",
        ),
    ],
)
def test_what_it_may_not_say(raw: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        parse_tenants(raw, "t.yaml")
    assert "tenants file t.yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shares_that_fill_a_tier_exactly_are_allowed() -> None:
    parsed(*(entry(name=name, guaranteed=f"{100 / 3}%") for name in "abc"))
    tenants = parsed(entry(guaranteed="50%"), entry(name="blue", guaranteed=500))
    check_fit(tenants.values(), "t.yaml", 1000)
    with pytest.raises(ConfigError, match=re.escape("999 B, the capacity of the tier")):
        check_fit(parsed(entry(guaranteed=500), entry(name="b", guaranteed=500)).values(), "t", 999)


def test_a_guarantee_above_the_limit_of_one_tier_is_refused_there() -> None:
    tenants = parsed(entry(guaranteed="50%", limit="100B")).values()
    check_fit(tenants, "t.yaml", 200)
    with pytest.raises(ConfigError, match="guaranteed 50% is more than its limit 100 B"):
        check_fit(tenants, "t.yaml", 202)
