"""UNSW-NB15 network flows: 196 features, ten classes from Normal to Worms.

39 numeric columns and the union vocabulary of both official files (133 protocols, 13 services, 11 states). The
training file alone lacks two states and would give 194 columns, the testing file alone lacks two protocols and four
states; the vocabulary is therefore fixed here, and any file gives the same 196 columns.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedtail.data.registry import Pooled
from fedtail.data.sources import SOURCES, Source, locate
from fedtail.data.tables.encode import published
from fedtail.data.tables.labels import label_codes
from fedtail.errors import FedtailError, one_of
from fedtail_experiments.data.scaling import published_table

SOURCES["unsw"] = Source(
    "UNSW-NB15 network flows",
    "unsw-nb15",
    ("UNSW_NB15_training-set.csv", "UNSW_NB15_testing-set.csv"),
    "https://research.unsw.edu.au/projects/unsw-nb15-dataset",
    "free for academic research, cite Moustafa and Slay (2015)",
    any_file=True,
    by_hand="UNSW_NB15_training-set.csv (and, if wanted, UNSW_NB15_testing-set.csv)",
)
PARTS = ("auto", "training", "testing", "both")
CLASSES = (
    "Normal", "Generic", "Exploits", "Fuzzers", "DoS", "Reconnaissance", "Analysis", "Backdoor", "Shellcode", "Worms",
)  # fmt: skip
NUMERIC = """
dur spkts dpkts sbytes dbytes rate sttl dttl sload dload sloss dloss sinpkt dinpkt sjit djit swin stcpb dtcpb
dwin tcprtt synack ackdat smean dmean trans_depth response_body_len ct_srv_src ct_state_ttl ct_dst_ltm
ct_src_dport_ltm ct_dst_sport_ltm ct_dst_src_ltm is_ftp_login ct_ftp_cmd ct_flw_http_mthd ct_src_ltm ct_srv_dst
is_sm_ips_ports
"""
PROTO = """
3pc a/n aes-sp3-d any argus aris arp ax.25 bbn-rcc bna br-sat-mon cbt cftp chaos compaq-peer cphb cpnx
crtp crudp dcn ddp ddx dgp egp eigrp emcon encap etherip fc fire ggp gmtp gre hmp i-nlsp iatp ib icmp idpr
idpr-cmtp idrp ifmp igmp igp il ip ipcomp ipcv ipip iplt ipnip ippc ipv6 ipv6-frag ipv6-no ipv6-opts
ipv6-route ipx-n-ip irtp isis iso-ip iso-tp4 kryptolan l2tp larp leaf-1 leaf-2 merit-inp mfe-nsp mhrp micp
mobile mtp mux narp netblt nsfnet-igp nvp ospf pgm pim pipe pnni pri-enc prm ptp pup pvp qnx rdp rsvp rtp
rvd sat-expak sat-mon sccopmce scps sctp sdrp secure-vmtp sep skip sm smp snp sprite-rpc sps srp st2 stp
sun-nd swipe tcf tcp tlsp tp++ trunk-1 trunk-2 ttp udp unas uti vines visa vmtp vrrp wb-expak wb-mon wsn
xnet xns-idp xtp zero
"""
SERVICE = "- dhcp dns ftp ftp-data http irc pop3 radius smtp snmp ssh ssl"
STATE = "ACC CLO CON ECO FIN INT PAR REQ RST URN no"
CATEGORIES = {"proto": PROTO.split(), "service": SERVICE.split(), "state": STATE.split()}
SCHEMA = published("attack_cat", CLASSES, NUMERIC.split(), CATEGORIES)


def unsw(part: str = "auto", test_fraction: float = 0.15, seed: int = 0, data_dir: str | None = None) -> Pooled:
    """UNSW-NB15 from the official ``training`` file (the paper's), the ``testing`` file or ``both``.

    ``auto`` takes the training file where it is there, else the testing file. The chosen rows are split anew,
    stratified, 15 % for the test set.
    """
    if part not in PARTS:
        raise one_of("data.part", part, PARTS)
    folder = locate("unsw", data_dir)
    frames = _frames(folder)
    if part == "auto":
        part = "training" if "training" in frames else "testing"
    wanted = ("training", "testing") if part == "both" else (part,)
    missing = [name for name in wanted if name not in frames]
    if missing:
        raise FedtailError(
            f"data.part = {part!r} needs the {missing[0]} file, but {folder} has only: {', '.join(frames)}; "
            f"get it from {SOURCES['unsw'].page} or use data.part={next(iter(frames))}"
        )
    frame = pd.concat([frames[name] for name in wanted], ignore_index=True)
    y, _ = label_codes(frame["attack_cat"].str.strip(), "attack_cat", str(folder), CLASSES)
    counts = np.bincount(y)
    ratio = counts.max() / counts[counts > 0].min()
    return published_table(
        "unsw", SCHEMA, frame, y, str(folder), "minmax", test_fraction, seed,
        classes=CLASSES,
        model="cnn_lstm",
        notes=(f"official files: {' + '.join(wanted)}, {len(y):,} rows, imbalance {ratio:.0f}",),
    )  # fmt: skip


def _frames(folder: Path) -> dict[str, pd.DataFrame]:
    """The files that are there, by what they are: some mirrors swap the two names, so the larger of two files is the
    training set."""
    named = {"training": folder / SOURCES["unsw"].files[0], "testing": folder / SOURCES["unsw"].files[1]}
    frames = {name: _read(path) for name, path in named.items() if path.is_file()}
    if len(frames) == 2 and len(frames["training"]) < len(frames["testing"]):
        frames = {"training": frames["testing"], "testing": frames["training"]}
    return frames


def _read(path: Path) -> pd.DataFrame:
    text = dict.fromkeys((*CATEGORIES, "attack_cat"), str)
    try:
        frame = pd.read_csv(path, encoding="utf-8-sig", dtype=text, keep_default_na=False, low_memory=False)
    except (ValueError, UnicodeDecodeError) as error:
        raise FedtailError(f"{path} is not a readable CSV file: {' '.join(str(error).split())[:200]}") from None
    if "attack_cat" not in frame:
        raise FedtailError(f"{path} has no column 'attack_cat'; is it the official file with its header?")
    return frame
