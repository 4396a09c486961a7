"""What travels with an engine's configuration and with a request: read, and refused in words."""

import pytest

from agentservesim.errors import InputError
from agentservesim.live.identity import Identity, IdentityError, identity_of
from agentservesim.live.settings import live_settings
from agentservesim.live.versions import TESTED_VLLM, check_vllm


def test_policies_come_from_the_engines_configuration_before_the_environment():
    environment = {"AGENTSERVESIM_LIVE": '{"retention": "ttl:tau_s=4"}'}
    assert live_settings({}, environment).retention == "ttl:tau_s=4"
    chosen = live_settings({"agentservesim": {"scheduling": {"plas": None}}, "other": 1}, environment)
    assert chosen.retention == "lru"
    assert type(chosen.policies()["scheduling"]).__name__ == "Plas"
    assert live_settings({}, {}).retention == "lru"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retentoin": "lru"}, "unknown key 'retentoin' \\(did you mean 'retention'\\?\\)"),
        ({"policy_timeout_s": 0}, "policy_timeout_s is 0"),
        ({"retention": 3}, "retention is 3"),
        (["lru"], "expected an object"),
    ],
)
def test_wrong_settings_are_refused_with_the_key_and_the_value(given, message):
    with pytest.raises(InputError, match=message):
        live_settings({"agentservesim": given}, {})


def test_an_environment_that_is_not_json_is_refused():
    with pytest.raises(InputError, match="AGENTSERVESIM_LIVE: 'ttl' is not JSON"):
        live_settings({}, {"AGENTSERVESIM_LIVE": "ttl"})


def test_an_untested_vllm_is_refused_with_the_tested_ones():
    check_vllm(f"{TESTED_VLLM[0]}+cpu")
    with pytest.raises(InputError, match=f"vllm 0.99.1: .*{TESTED_VLLM[0]}"):
        check_vllm("0.99.1")


def test_identity_is_read_from_vllm_xargs():
    assert identity_of(None) is identity_of({"other": 1}) is None
    assert identity_of({"program_id": 17}) == Identity("17")
    assert identity_of(
        {"program_id": "p", "turn_id": 3, "parent_turn_ids": [1, "2"], "tool_name": "bash", "last_call": 1}
    ) == Identity("p", "3", ("1", "2"), "bash", 1)


@pytest.mark.parametrize(
    "extra_args",
    [
        {"program_id": ""},
        {"program_id": 1.5},
        {"program_id": "p", "turn_id": [1]},
        {"program_id": "p", "parent_turn_ids": "1"},
        {"program_id": "p", "tool_name": True},
        {"program_id": "p", "last_call": 2},
    ],
)
def test_a_wrong_identity_names_the_field(extra_args):
    field = list(extra_args)[-1]
    with pytest.raises(IdentityError, match=f"vllm_xargs.{field} "):
        identity_of(extra_args)
