"""Adult census income at a chosen imbalance: 104 features, two classes.

6 numeric and 98 one-hot columns of the 45,222 rows without "?". The minority class is thinned in the whole pool, so
that training, validation and test keep the same ratio; 15 % are the test set and a further 15 % (3/17 of the rest,
by default) become the clients' validation splits.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from fedtail.core.random import generator
from fedtail.data.registry import Pooled
from fedtail.data.sources import SOURCES, Remote, Source, locate
from fedtail.data.tables.encode import published
from fedtail.data.tables.labels import label_codes
from fedtail.errors import FedtailError
from fedtail_experiments.data.scaling import published_table

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
SOURCES["adult"] = Source(
    "Adult census income (UCI)",
    "adult",
    ("adult.data", "adult.test"),
    "https://archive.ics.uci.edu/dataset/2/adult",
    "CC BY 4.0",
    (
        Remote(f"{_UCI}/adult.data", "md5:5d7c39d7b8804f071cdd1f2a7c460872"),
        Remote(f"{_UCI}/adult.test", "md5:35238206dfdf7f1fe215bbb874adecdc"),
    ),
)
COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship", "race",
    "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country", "income",
)  # fmt: skip
CLASSES = ("<=50K", ">50K")
SCHEMA = published(
    "income",
    CLASSES,
    ("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"),
    {
        "workclass": ("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov",
                      "Without-pay"),
        "education": ("Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th",
                      "7th-8th", "12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool"),
        "marital-status": ("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed",
                           "Married-spouse-absent", "Married-AF-spouse"),
        "occupation": ("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty",
                       "Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving",
                       "Priv-house-serv", "Protective-serv", "Armed-Forces"),
        "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
        "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
        "sex": ("Female", "Male"),
        "native-country": (
            "United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)",
            "India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland",
            "Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador",
            "Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia",
            "El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands"),
    },
)  # fmt: skip


def adult(imbalance: float = 3.17, test_fraction: float = 0.15, seed: int = 0, data_dir: str | None = None) -> Pooled:
    """Adult income with ``imbalance`` majority rows per minority row (the paper: 3.17, 10, 20)."""
    folder = locate("adult", data_dir)
    frame = pd.concat([_read(folder / "adult.data", 0), _read(folder / "adult.test", 1)], ignore_index=True)
    frame = frame[~(frame == "?").any(axis=1)].reset_index(drop=True)
    y, _ = label_codes(frame["income"].str.rstrip("."), "income", str(folder), CLASSES)
    keep = thin_minority(y, imbalance, seed)
    frame, y = frame.iloc[keep], y[keep]
    return published_table(
        "adult", SCHEMA, frame, y, str(folder), "standard", test_fraction, seed,
        classes=CLASSES,
        model="mlp",
        model_options={"hidden": (32, 16, 8)},
        notes=("numeric columns are standardised with statistics of all rows outside the test set",),
    )  # fmt: skip


def thin_minority(y: np.ndarray, imbalance: float, seed: int) -> np.ndarray:
    """Ascending indices that keep all of class 0 and ``round(n_0 / imbalance)`` of class 1."""
    n = np.bincount(y, minlength=2)
    want = round(n[0] / imbalance) if imbalance > 0 else 0
    if not 1 <= want <= n[1]:
        raise FedtailError(
            f"data.imbalance = {imbalance!r} is outside [{n[0] / n[1]:.3f}, {n[0]}]: only the minority class is "
            f"thinned, and there are {n[0]} and {n[1]} complete rows of the two classes"
        )
    minority = generator(seed, "adult/minority").choice(np.flatnonzero(y == 1), size=want, replace=False)
    return np.sort(np.concatenate([np.flatnonzero(y == 0), minority]))


def _read(path: Path, skip: int) -> pd.DataFrame:
    if not path.is_file():
        raise FedtailError(
            f"{path} is missing; provide the complete official folder, or delete it to download it again"
        )
    return pd.read_csv(
        path, header=None, names=list(COLUMNS), skiprows=skip, skipinitialspace=True, dtype=str, keep_default_na=False
    )
