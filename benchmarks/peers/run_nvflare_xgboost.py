"""NVFlare's own XGBoost job, histograms over all sites, in its simulator as XGBHorizontalRecipe makes it (see `trees.py
peers`), in its own environment: run_nvflare_xgboost.py SITES.npz ROUNDS OUT.npz.

It needs an xgboost with the federated plugin, which releases below 3.4 have."""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xgboost as xgb
from nvflare.app_opt.xgboost.data_loader import XGBDataLoader
from nvflare.app_opt.xgboost.recipes import XGBHorizontalRecipe
from nvflare.recipe import SimEnv, set_per_site_config

PARAMS = {"objective": "binary:logistic", "eval_metric": "auc", "eta": 0.1, "max_depth": 8, "tree_method": "hist"}
PARAMS |= {"nthread": 1}


class Rows(XGBDataLoader):
    """Training rows of the site that asks, and its validation rows."""

    def __init__(self, path: str) -> None:
        self.path = path

    def load_data(self) -> tuple[xgb.DMatrix, xgb.DMatrix]:
        data, site = np.load(self.path), int(self.client_id.removeprefix("site-")) - 1
        return tuple(matrix(data, (data["part"] == part) & (data["site"] == site)) for part in (0, 1))


def matrix(data: np.lib.npyio.NpzFile, rows: np.ndarray) -> xgb.DMatrix:
    return xgb.DMatrix(data["x"][rows], data["y"][rows], feature_types=list(data["types"]), enable_categorical=True)


def main(path: str, rounds: int, out: str) -> None:
    data = np.load(path)
    names = [f"site-{k + 1}" for k in range(int(data["site"].max()) + 1)]
    from run_nvflare_xgboost import Rows  # a job names classes by their module, and "__main__" is none

    recipe = XGBHorizontalRecipe("trees", len(names), rounds, early_stopping_rounds=rounds, xgb_params=PARAMS)
    set_per_site_config(recipe, {name: {"data_loader": Rows(path)} for name in names})
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        recipe.execute(SimEnv(clients=names, num_threads=len(names), workspace_root=folder))
        seconds = time.perf_counter() - began
        booster = xgb.Booster(model_file=sorted(Path(folder).rglob("site-1/**/model.json"))[0])
    held, test = (booster.predict(matrix(data, data["part"] == part)) for part in (1, 2))
    np.savez(out, held=held, test=test)
    print("RESULT " + json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
