"""Profiles of networks: what is read from them, what is refused, and what is built from them."""

from __future__ import annotations

import collections
import dataclasses

import pytest
from absl import flags
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import fabric, fabric_flags
from tf_ipu_dp.collectives.fabric import Fabric, FabricError, Link

SECONDS = st.one_of(st.just(0.0), st.floats(1e-7, 10.0))
LINK_FIELDS = {
    "rate": st.one_of(st.none(), st.floats(1e6, 1e11)),
    "delay_s": SECONDS,
    "jitter_s": SECONDS,
    "loss": st.floats(0.0, 0.5),
    "loss_burst": st.one_of(st.none(), st.floats(1.0, 100.0)),
    "outage_s": SECONDS,
}


@st.composite
def fabrics(draw):
    hosts = draw(st.integers(1, 6))
    numbers = draw(st.lists(st.integers(0, hosts - 1), unique=True, max_size=3))
    changes = []
    for number in sorted(numbers):
        names = draw(st.lists(st.sampled_from(sorted(LINK_FIELDS)), unique=True, min_size=1))
        changes.append((number, tuple((name, draw(LINK_FIELDS[name])) for name in sorted(names))))
    return Fabric(
        "drawn",
        hosts=hosts,
        link=Link(outage_every_s=20.0, **{name: draw(values) for name, values in LINK_FIELDS.items()}),
        host_changes=tuple(changes),
        ranks_per_host=draw(st.integers(1, 16)),
        placement=draw(st.sampled_from(fabric.PLACEMENTS)),
        jitter_law=draw(st.sampled_from(fabric.JITTER_LAWS)),
        reordering=draw(st.booleans()),
        mtu=draw(st.integers(576, 9216)),
        congestion_control=draw(st.sampled_from(["cubic", "bbr", "reno"])),
        burst=draw(st.one_of(st.none(), st.integers(9230, 10**6))),
        queue=draw(st.one_of(st.none(), st.integers(9230, 10**9))),
        dilation=draw(st.floats(1.0, 20.0)),
    )


@settings(max_examples=30)
@given(fabrics())
def test_every_network_survives_its_profile(drawn):
    assert fabric.parse(drawn.to_text(), "drawn") == drawn


@settings(max_examples=30)
@given(fabrics())
def test_every_host_gets_its_ranks(drawn):
    counted = collections.Counter(drawn.host_of(rank) for rank in range(drawn.ranks))
    assert counted == dict.fromkeys(range(drawn.hosts), drawn.ranks_per_host)


@settings(max_examples=30)
@given(fabrics())
def test_dilation_divides_rates_and_multiplies_times(drawn):
    for before, after in zip(drawn.links, drawn.dilated().links):
        assert (before.rate is None) == (after.rate is None)
        if before.rate is not None:
            assert after.rate == pytest.approx(before.rate / drawn.dilation)
        assert after.delay_s == pytest.approx(before.delay_s * drawn.dilation)
        assert (after.loss, after.loss_burst) == (before.loss, before.loss_burst)
    assert drawn.dilated().tcp_min_timeout_s == pytest.approx(0.2 * drawn.dilation)


@settings(max_examples=30)
@given(fabrics())
def test_facts_name_every_setting_and_say_nothing_twice(drawn):
    facts = drawn.facts()
    assert set(fabric.SETTINGS) < set(facts) and all(isinstance(value, str) for value in facts.values())
    assert "\n" not in drawn.render() and drawn.render().startswith("drawn: ")


@pytest.mark.parametrize("name", fabric_flags.profile_names())
def test_every_profile_of_the_package_can_be_read(name):
    found = fabric_flags.load(name)
    assert found.name == name and fabric.parse(found.to_text(), name) == found


def test_the_profiles_are_those_that_the_documentation_names():
    assert set(fabric_flags.profile_names()) >= {"r4", "ethernet-10g", "wan", "lossy", "slow-host"}


def test_r4_is_four_hosts_at_1_gbit():
    r4 = fabric_flags.load("r4")
    assert r4.render() == "r4: 4 hosts x 1 rank, 1 Gbit/s, MTU 9000, cubic, time dilated 4 times"
    assert r4.payload_share == pytest.approx(8948 / 9014)


def test_a_slow_host_has_a_link_of_its_own():
    slow = fabric_flags.load("slow-host")
    assert [link.rate for link in slow.links] == [12.5e6, 12.5e6, 3.125e6, 12.5e6]
    assert (slow.slowest_rate, slow.rate_between(0, 1), slow.rate_between(2, 1)) == (3.125e6, 12.5e6, 3.125e6)


def test_what_a_host_does_not_change_follows_the_other_hosts():
    slow = fabric_flags.load("slow-host").override({"delay": "5ms"})
    assert [link.delay_s for link in slow.links] == [5e-3] * 4 and slow.links[2].rate == 3.125e6


def test_round_trips_add_the_delays_of_both_hosts():
    found = Fabric("a", hosts=3, link=Link(delay_s=2e-3)).override_host(1, {"delay": "10ms"})
    assert found.round_trip_s(0, 2) == pytest.approx(4e-3) and found.round_trip_s(0, 1) == pytest.approx(12e-3)


def test_the_order_of_lines_does_not_matter():
    text = "[host 1]\noutage = 1s\noutage_every = 5s\n"
    found = fabric.parse(f"burst = 1000\nmtu = 600 # small\n\nhosts = 2\n{text}", "a")
    assert (found.burst, found.links[1].outage_s, found.links[0].outage_s) == (1000, 1.0, 0.0)


BAD_PROFILES = {
    "hosts = 4\nrat = 1Gbit": "a, line 2: rat is not a setting. Did you mean rate?",
    "hosts = 4\nxyzzy = 1": "a, line 2: xyzzy is not a setting. Use hosts, ranks_per_host, placement,",
    "hosts = 4\nrate = -1Gbit": "a, line 2: rate=-1Gbit: '-1Gbit' is not a rate like 100Mbit, 1Gbit or 25GB/s.",
    "hosts = 4\nrate = 0Gbit": "a, line 2: rate=0Gbit: 0Gbit is not a rate: it must be more than 0.",
    "hosts = 4\nrate = 1gbit": "a, line 2: rate=1gbit: '1gbit' has the unit 'gbit', which is not known. Write 1Gbit.",
    "hosts = 4\nrate = 10bit": "a, line 2: rate=10.0bit is not from 8Kbit to 8Tbit.",
    "hosts = 0": "a, line 1: hosts=0 is not from 1 to 64.",
    "hosts = 65": "a, line 1: hosts=65 is not from 1 to 64.",
    "hosts = four": "a, line 1: hosts=four: it takes a whole number.",
    "rate = 1Gbit": "a does not say how many hosts there are. Add a line like hosts = 4.",
    "hosts = 4\nloss = 1.5": "a, line 2: loss=1.5: 1.5 is not from 0 to less than 100 %. Write 1.5% for percent.",
    "hosts = 4\nloss = 100%": "a, line 2: loss=100%: 100% is not from 0 to less than 100 %.",
    "hosts = 4\nloss = -1%": "a, line 2: loss=-1%: -1% is not from 0 to less than 100 %.",
    "hosts = 4\nloss = nan": "a, line 2: loss=nan: 'nan' is not a loss like 1% or 0.01.",
    "hosts = 4\nloss_burst = 0.5": "a, line 2: loss_burst=0.5 is not a mean number of packets, from 1 on.",
    "hosts = 4\nloss = 60%\nloss_burst = 2": (
        "a, line 3: loss=60% is more than 50 %, which loss_burst does not go with."
    ),
    "hosts = 4\ndelay = 5": "a, line 2: delay=5: '5' has no unit. Use ns, us, ms, s, min, h.",
    "hosts = 4\ndelay = 2h": "a, line 2: delay=7200s is not from 0 to 600 s.",
    "hosts = 4\njitter = -1ms": "a, line 2: jitter=-1ms: '-1ms' is not a time like 5us, 2ms or 1s.",
    "hosts = 4\njitter_law = gauss": "a, line 2: jitter_law=gauss is not normal, lognormal or uniform.",
    "hosts = 4\noutage = 1s": "a, line 2: outage=1s is not shorter than outage_every.",
    "hosts = 4\nplacement = ring": "a, line 2: placement=ring is not block or round-robin.",
    "hosts = 4\nmtu = 100": "a, line 2: mtu=100 is not from 576 to 9216.",
    "hosts = 4\nmtu = 9000\nburst = 2KiB": (
        "a, line 3: burst=2048 does not hold one packet of MTU 9000 and 14 B of header."
    ),
    "hosts = 4\nqueue = 1KiB": "a, line 2: queue=1024 does not hold one packet of MTU 1500 and 14 B of header.",
    "hosts = 4\ndilation = 0.5": "a, line 2: dilation=0.5 is not from 1 to 1000.",
    "hosts = 4\ndilation = inf": "a, line 2: dilation=inf: it takes a number.",
    "hosts = 4\nranks_per_host = 0": "a, line 2: ranks_per_host=0 is not from 1 to 1,024.",
    "hosts = 4\nreordering = maybe": "a, line 2: reordering=maybe: it takes yes or no.",
    "hosts = 4\ncongestion_control = CUBIC": (
        "a, line 2: congestion_control=CUBIC is not a name like cubic, bbr or reno."
    ),
    "hosts = 4\nrate": "a, line 2: 'rate' has no value. Write rate = VALUE.",
    "hosts = 4\nrate =": "a, line 2: 'rate =' has no value. Write rate = VALUE.",
    "hosts = 4\n[hots 2]": "a, line 2: [hots 2] is not a section. Write [host 2] for the link of host 2.",
    "hosts = 4\n\nhosts = 5": "a, line 3: hosts is set in line 1 already. Remove one of the two.",
    "hosts = 4\n[host 4]\nrate = 1Gbit": "a, line 3: There is no host 4: 4 hosts are numbered 0 to 3.",
    "hosts = 4\n[host 1]\nmtu = 9000": "a, line 3: mtu is not a setting of a single host. Use rate, ",
    "hosts = 4\n[host 1]\nrates = 1Gbit": "a, line 3: rates is not a setting. Did you mean rate?",
}


@pytest.mark.parametrize("text", sorted(BAD_PROFILES))
def test_a_mistake_in_a_profile_is_one_sentence_with_its_line(text):
    with pytest.raises(FabricError) as refusal:
        fabric.parse(text, "a")
    assert str(refusal.value).startswith(BAD_PROFILES[text]) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "fields", [{"rate": -1.0}, {"rate": float("nan")}, {"delay_s": -1e-3}, {"jitter_s": -1.0}, {"loss": 1.5}]
)
def test_records_refuse_what_profiles_refuse(fields):
    with pytest.raises(FabricError):
        Link(**fields)


def test_a_single_host_is_checked_with_the_settings_of_all():
    with pytest.raises(FabricError, match="outage=1s is not shorter than outage_every"):
        Fabric("a", hosts=2, host_changes=((0, (("outage_s", 1.0),)),))


def from_words(*words):
    fv = flags.FlagValues()
    fabric_flags.define_flags(fv)
    cli.parse(words, fv)
    return fabric_flags.from_flags(fv)


def test_without_the_flag_there_is_no_network():
    assert from_words() is None


def test_flags_override_the_profile():
    words = ("--fabric=r4", "--fabric_hosts=8", "--ranks_per_host=2", "--rate=100Mbit", "--delay=2ms", "--jitter=1ms")
    found = from_words(*words, "--loss=0.1%", "--mtu=1500", "--congestion_control=bbr", "--placement=round-robin")
    assert found == dataclasses.replace(
        fabric_flags.load("r4"), hosts=8, ranks_per_host=2, mtu=1500, congestion_control="bbr", placement="round-robin",
        link=Link(rate=12.5e6, delay_s=2e-3, jitter_s=1e-3, loss=1e-3),
    )  # fmt: skip
    assert from_words("--fabric=r4", "--dilation=10").dilated().link.rate == pytest.approx(12.5e6)


def test_a_slow_host_can_be_asked_for_by_rate_delay_and_loss():
    found = from_words("--fabric=r4", "--slow_host=2:25Mbit,5ms,1%")
    assert found.links[2] == Link(rate=3.125e6, delay_s=5e-3, loss=0.01)
    assert found.links[1] == fabric_flags.load("r4").link


def test_a_profile_is_also_found_by_its_path(tmp_path):
    (tmp_path / "mine.ini").write_text("hosts = 3\nrate = 1Mbit\n")
    assert from_words(f"--fabric={tmp_path / 'mine.ini'}").hosts == 3


BAD_FLAGS = {
    ("--rate=1Mbit",): "--rate=1Mbit needs emulated hosts. Add --fabric=PROFILE, for example --fabric=r4.",
    ("--fabric=r5",): "--fabric=r5 is neither a profile nor a file that can be read. Did you mean r4?",
    ("--fabric=/",): "--fabric=/ is neither a profile nor a file that can be read. Use burst-loss, ",
    ("--fabric=r4", "--rate=-1Mbit"): "--rate=-1Mbit: '-1Mbit' is not a rate like 100Mbit, 1Gbit or 25GB/s.",
    ("--fabric=r4", "--loss=1.5"): "--loss=1.5: 1.5 is not from 0 to less than 100 %. Write 1.5% for percent.",
    ("--fabric=r4", "--fabric_hosts=0"): "--fabric_hosts=0 is not from 1 to 64.",
    ("--fabric=r4", "--fabric_hosts=x"): "--fabric_hosts=x: it takes a whole number.",
    ("--fabric=slow-host", "--fabric_hosts=2"): "There is no host 2: 2 hosts are numbered 0 to 1.",
    ("--fabric=r4", "--slow_host=9:1Mbit"): "There is no host 9: 4 hosts are numbered 0 to 3.",
    ("--fabric=r4", "--slow_host=2"): "--slow_host=2 is not possible. --slow_host takes a host and its rate, delay or",
    ("--fabric=r4", "--slow_host=2:fast"): "--slow_host=2:fast is not possible: 'fast' is none of them. --slow_host",
    ("--fabric=r4", "--mtu=100"): "--mtu=100 is not from 576 to 9216.",
}


@pytest.mark.parametrize("words", sorted(BAD_FLAGS))
def test_a_mistake_in_a_flag_is_one_sentence_with_the_flag(words):
    with pytest.raises(cli.UsageError) as refusal:
        from_words(*words)
    assert str(refusal.value).startswith(BAD_FLAGS[words]) and "\n" not in str(refusal.value)


def test_a_profile_with_a_typo_is_named_with_its_line(tmp_path):
    path = tmp_path / "mine.ini"
    path.write_text("hosts = 3\ndelai = 1ms\n")
    with pytest.raises(cli.UsageError) as refusal:
        from_words(f"--fabric={path}")
    assert str(refusal.value) == f"--fabric={path}, line 2: delai is not a setting. Did you mean delay?"


def test_the_help_describes_every_flag():
    fv = flags.FlagValues()
    fabric_flags.define_flags(fv)
    text = cli.render_help("measure", "About.", {"Network": fabric_flags.FLAG_NAMES}, fv, 100)
    assert "--fabric=PROFILE" in text and "--slow_host=HOST:VALUES" in text and "ethernet-10g" in text
