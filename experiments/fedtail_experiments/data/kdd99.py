"""KDD Cup 1999 network connections: 41 columns, from ordinary traffic to attacks that occur a few times.

The file of ten per cent, 494,021 rows, seven of ten of which say the same as another one: floods write the same line
over and over. A copy in the test set would be known by heart, so each row is kept once; 145,586 are left. The
labels are the 23 names of the file, or the five kinds that they belong to.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pandas as pd

from fedtail.data.registry import Pooled
from fedtail.data.sources import SOURCES, Remote, Source, locate
from fedtail.data.tables.pooled import table_from_frame
from fedtail.data.tables.read import Table
from fedtail.errors import FedtailError, one_of

SHA256 = "8045aca0d84e70e622d1148d7df782496f6333bf6eb979a1b0837c42a9fd9561"
SOURCES["kdd99"] = Source(
    "KDD Cup 1999, 10 percent subset",
    "kddcup99",
    ("kddcup.data_10_percent.gz",),
    "https://kdd.ics.uci.edu/databases/kddcup99/kddcup99.html",
    "CC BY 4.0",
    (Remote("https://ndownloader.figshare.com/files/5976042", f"sha256:{SHA256}"),),
)

LABELS = ("kinds", "attacks")
KINDS = {
    "normal": "normal",
    "dos": "back land neptune pod smurf teardrop",
    "probe": "ipsweep nmap portsweep satan",
    "r2l": "ftp_write guess_passwd imap multihop phf spy warezclient warezmaster",
    "u2r": "buffer_overflow loadmodule perl rootkit",
}
CATEGORIES = ("protocol_type", "service", "flag")
NAMES = """
duration protocol_type service flag src_bytes dst_bytes land wrong_fragment urgent hot num_failed_logins logged_in
num_compromised root_shell su_attempted num_root num_file_creations num_shells num_access_files num_outbound_cmds
is_host_login is_guest_login count srv_count serror_rate srv_serror_rate rerror_rate srv_rerror_rate same_srv_rate
diff_srv_rate srv_diff_host_rate dst_host_count dst_host_srv_count dst_host_same_srv_rate dst_host_diff_srv_rate
dst_host_same_src_port_rate dst_host_srv_diff_host_rate dst_host_serror_rate dst_host_srv_serror_rate
dst_host_rerror_rate dst_host_srv_rerror_rate
"""
COLUMNS = NAMES.split()


def kdd99(labels: str = "kinds", test_fraction: float = 0.2, seed: int = 0, data_dir: str | None = None) -> Pooled:
    """KDD Cup 1999 by the five ``kinds`` of traffic (rarest: 52 rows) or by all 23 ``attacks`` (rarest: 2 rows)."""
    if labels not in LABELS:
        raise one_of("data.labels", labels, LABELS)
    frame = read_connections(locate("kdd99", data_dir) / SOURCES["kdd99"].files[0])
    if labels == "kinds":
        kind = {attack: kind for kind, attacks in KINDS.items() for attack in attacks.split()}
        frame["label"] = frame["label"].map(kind)
    order = frame["label"].value_counts()
    return table_from_frame(
        Table(frame, [], "kdd99"),
        "label",
        classes=tuple(str(name) for name in order.index),
        categories=CATEGORIES,
        numbers=[name for name in COLUMNS if name not in CATEGORIES],
        max_levels=128,
        test_fraction=test_fraction,
        seed=seed,
    )


def read_connections(path: Path) -> pd.DataFrame:
    """Every distinct line of the file, in its order."""
    try:
        frame = pd.read_csv(path, header=None, names=[*COLUMNS, "label"], compression="gzip")
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise FedtailError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    frame["label"] = frame["label"].astype(str).str.rstrip(".")
    known = {attack for attacks in KINDS.values() for attack in attacks.split()}
    if strange := sorted(set(frame["label"]) - known):
        raise FedtailError(f"{path} has the label {strange[0]!r}; is it the file {path.name} of KDD Cup 1999?")
    return frame.drop_duplicates(ignore_index=True)
