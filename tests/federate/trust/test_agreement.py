"""What sites have signed before any of them answers anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtail.federate.protocol.agreement import (
    AgreementError,
    Offer,
    Party,
    Roster,
    id_of,
    read_roster,
    read_site_key,
    seed_of,
)

from .loopback import make_folders

NAMES = ("east", "north", "south")
DOCUMENT = {"settings": {"lr": 0.1}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sites")
    make_folders(root, list(NAMES))
    return root


@pytest.fixture
def parties(folders: Path) -> dict[str, Party]:
    return {name: Party(name, DOCUMENT) for name in NAMES}


def roster(folders: Path) -> Roster:
    return read_roster(folders / "north" / "sites.pub")


def offers(folders: Path, parties: dict[str, Party]) -> dict[str, Offer]:
    listed = roster(folders)
    return {name: p.offer(read_site_key(folders / name / "site.key"), listed) for name, p in parties.items()}


def agree(folders: Path, parties: dict[str, Party]) -> None:
    told, listed = offers(folders, parties), roster(folders)
    revealed = {name: p.reveal(listed, told) for name, p in parties.items()}
    numbers = {name: number for name, (number, _) in revealed.items()}
    for name, party in parties.items():
        party.begin(numbers, {peer: sealed[name] for peer, (_, sealed) in revealed.items() if peer != name})


def test_sites_that_agree_have_one_seed_and_one_key_that_no_message_had(
    folders: Path, parties: dict[str, Party]
) -> None:
    agree(folders, parties)
    assert len({p.seed for p in parties.values()}) == len({p.common for p in parties.values()}) == 1
    assert len({p.id for p in parties.values()}) == 1
    for name, party in parties.items():
        for peer, secret in party.pairs().items():
            assert parties[peer].pairs()[name] == secret
    again = {name: Party.from_json(p.to_json()) for name, p in parties.items()}
    assert again["north"].pairs() == parties["north"].pairs() and again["north"].common == parties["north"].common


def test_the_same_document_agreed_on_twice_shares_nothing(folders: Path, parties: dict[str, Party]) -> None:
    second = {name: Party(name, DOCUMENT) for name in NAMES}
    agree(folders, parties)
    agree(folders, second)
    one, other = parties["north"], second["north"]
    assert one.seed != other.seed and one.common != other.common and one.id != other.id
    assert not set(one.pairs().values()) & set(other.pairs().values())


def forged(offer: Offer, **changes: str) -> Offer:
    return replace(offer, **changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: {**o, "east": forged(o["east"], key="00" * 32)}, "not signed by its key"),
        (lambda o: {**o, "east": forged(o["east"], signature="00")}, "not signed by its key"),
        (lambda o: {**o, "east": forged(o["south"], site="east")}, "not signed by its key"),
        (lambda o: {**o, "east": o["south"]}, "not signed by its key"),
        (lambda o: {k: v for k, v in o.items() if k != "east"}, "offers of other sites"),
        (lambda o: {**o, "west": o["east"]}, "offers of other sites"),
    ],
)
def test_no_site_reveals_anything_before_all_have_signed(
    folders: Path, parties: dict[str, Party], change: Any, words: str
) -> None:
    with pytest.raises(AgreementError, match=words):
        parties["north"].reveal(roster(folders), change(offers(folders, parties)))


def test_a_site_that_signed_another_document_stops_the_others(folders: Path, parties: dict[str, Party]) -> None:
    parties["east"] = Party("east", {"settings": {"lr": 10.0}})
    with pytest.raises(AgreementError, match="'east' has signed another document"):
        parties["north"].reveal(roster(folders), offers(folders, parties))


def test_a_site_with_another_list_of_sites_stops_the_others(folders: Path, parties: dict[str, Party]) -> None:
    listed = roster(folders)
    told = offers(folders, parties)
    key = read_site_key(folders / "east" / "site.key")
    told["east"] = parties["east"].offer(key, Roster({**listed.lines, "east": listed.lines["north"]}))
    with pytest.raises(AgreementError, match="another list of sites"):
        parties["north"].reveal(listed, told)


def test_a_key_that_the_server_made_is_nobodys(folders: Path, parties: dict[str, Party], tmp_path: Path) -> None:
    """A server that plays a site with keys of its own: the sites' own lists do not have them."""
    make_folders(tmp_path, list(NAMES))
    told = offers(folders, parties)
    forger = Party("east", DOCUMENT)
    told["east"] = forger.offer(read_site_key(tmp_path / "east" / "site.key"), roster(folders))
    with pytest.raises(AgreementError, match="the offer of 'east' is not signed by its key"):
        parties["north"].reveal(roster(folders), told)


def test_a_number_that_was_changed_after_the_others_were_known_is_refused(
    folders: Path, parties: dict[str, Party]
) -> None:
    told, listed = offers(folders, parties), roster(folders)
    revealed = {name: p.reveal(listed, told) for name, p in parties.items()}
    numbers = {name: number for name, (number, _) in revealed.items()}
    shares = {peer: sealed["north"] for peer, (_, sealed) in revealed.items() if peer != "north"}
    assert seed_of(id_of(told), {**numbers, "east": "11" * 32}) != seed_of(id_of(told), numbers)
    with pytest.raises(AgreementError, match="'east' has revealed another number"):
        parties["north"].begin({**numbers, "east": "11" * 32}, shares)
    with pytest.raises(AgreementError, match="altered, or is for somebody else"):
        parties["north"].begin(numbers, {**shares, "east": shares["south"]})
    parties["north"].begin(numbers, shares)


def test_offers_cannot_be_exchanged_once_a_number_is_revealed(folders: Path, parties: dict[str, Party]) -> None:
    told, listed = offers(folders, parties), roster(folders)
    parties["north"].reveal(listed, told)
    fresh = {**told, "east": Party("east", DOCUMENT).offer(read_site_key(folders / "east" / "site.key"), listed)}
    with pytest.raises(AgreementError, match="another agreement than this site has begun"):
        parties["north"].reveal(listed, fresh)
