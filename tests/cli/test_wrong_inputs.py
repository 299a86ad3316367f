"""Wrong inputs of every command: one clear line that names the value, what is allowed and the fix; exit code 2.

A line of ``WRONG`` is what somebody types after ``fedtail``, then ``::`` and the words that the error must have.
``$T`` is a good table; ``WORK`` makes the files.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedtail.cli import main

TABLE = "--table t.csv --label y --site site"
SPEAKS_JSON = ("run", "compare", "tune", "evaluate", "monitor", "recalibrate", "data inspect", "data list", "methods",
               "deploy run", "deploy status", "deploy doctor", "deploy evaluate", "deploy monitor", "site keys",
               "site health", "bench")  # fmt: skip
WRONG = """
# fedtail
nope :: 'nope'; fedtail --help
rum :: 'rum'; Did you mean 'run'?
--nope :: '--nope'; fedtail --help

# demo
demo extra :: (extra); fedtail demo --help
demo --out ok.csv :: cannot write 'ok.csv'; another location

# run: flags
run --methd fedavg :: --methd; --method
run --method fedcgnmm :: method 'fedcgnmm' is unknown; did you mean 'fedcgnm'; fedavg
run --dataset digit :: data set; did you mean 'digits'; blobs
run --rates uniforn :: did you mean 'uniform'
run --model mpl :: did you mean 'mlp'
run --optimizer adamw :: local.optimizer; 'adamw'; did you mean 'adam'
run --method scaffold --optimizer adam :: local.optimizer = 'adam'; 'scaffold'; 'sgd'
run --rounds ten :: 'ten'; integer
run --rounds 0 :: run.rounds = 0; [1, 1e+06]
run --rounds 11111111111111111111111 :: run.rounds = 111; [1, 1e+06]
run --clients 0 --dataset blobs :: data.clients = 0; [1, 1e+07]
run --clients 100000 :: clients = 100000; exceeds the
run --epochs 0 :: local.epochs = 0; [1, 10000]
run --lr 0 :: local.lr; must be above 0 or 'auto'
run --lr fast :: local.lr = 'fast' must be a number or 'auto'
run --seed -1 :: run.seed = -1; [0,
run --seed one :: 'one'; integer
run --device gpu :: gpu; cpu
run --device cuda:99 :: engine.device = 'cuda:99'; use cpu
run --rates inf :: rates.rate = inf; [0, 2]
run --rates 7 :: rates.rate = 7.0; [0, 2]
run --rates -0.5 :: rates.rate = -0.5; [0, 2]
run --rates x.json :: 'x.json'; no table 'rates'; fedtail tune
run --rates gone.toml :: 'gone.toml'; No such file; fedtail tune
run --rates fedhoo rates.low=0.9 rates.high=0.4 :: rates.high = 0.4 must be above 0.9
run --rates fedhoo rates.depth=0 :: fedhoo has no option 'depth'; did you mean 'max_depth'
run --rates uniform rates.low=0.4 :: uniform has no option 'low'; rate
run --label y :: --label 'y'; --table or --tables
run --site site :: --site 'site'; --table
run --table t.csv --images pictures :: --table and --images; only one

# run: keys
run method.betta=0.7 :: fedcgnm has no option 'betta'; did you mean 'beta'
run method.beta=1.5 :: method.beta = 1.5; [0, 1)
run method.beta=high :: method.beta = 'high' must be a number
run method.dispersion=variancee :: method.dispersion; did you mean 'variance'
run method.n_groups=0 :: method.n_groups = 0 must be at least 1
run method.delta=-1 :: method.delta = -1.0 must be at least 0
run method.delta=nan :: method.delta = nan must be at least 0
run metod.beta=0.5 :: 'metod'; did you mean 'method'
run local.lr=-1 :: local.lr = -1; must be above 0
run local.lr=inf :: local.lr = inf; finite
run local.lrr=1 :: [local] has no key 'lrr'; did you mean 'lr'; batch_size
run local.schedule=cosin :: local.schedule; did you mean 'cosine'
run local.batch_size=0 :: local.batch_size = 0; [1, 1e+06] or 'auto'
run local.epochs=1.5 :: local.epochs = 1.5 must be a whole number
run server.beta1=0.5 :: server.beta1 = 0.5; no longer a setting; 0.9
run server.lr=0.3 :: server.lr has no effect; server.optimizer = 'none'; 'adam'
run server.optimizer=adamm :: 'adamm'; did you mean 'adam'
run server.aggregate=krun :: 'krun'; did you mean 'krum'
run method.name=ratio_loss local.optimizer=momentum :: 'momentum'; 'ratio_loss'; plain gradient
run data.partition=dirichlett :: did you mean 'dirichlet'
run data.partition=iid data.alpha=0.1 :: data.alpha has no effect
run data.partition=gone.csv :: 'gone.csv'; dirichlet
run data.alpha=0 :: data.alpha = 0 must be above 0
run data.imbalance=0.5 :: imbalance = 0.5; must be at least 1
run data.augment=croop :: croop; crop-flip
run run.metric=defect_score :: defect_score; data.background; macro_f1
run run.select=bets :: did you mean 'best'
run run.quorum=2 :: run.quorum = 2; (0, 1]
run run.patience=-1 :: run.patience = -1 must be at least 0
run run.diagnostics=losses,x :: run.diagnostics; 'x'; alignment
run run.trackers=wandb :: run.trackers = 'wandb'; no longer a setting; on_round
run run.name='../up' :: run.name; folder name
run engine.path=fast :: path; reference
run engine.precision=half :: 'half'; fp32
run engine.workers=0 :: engine.workers = 0 must be at least 1 or 'auto'
run decision.goal=f1 :: 'f1'; macro_f1
run decision.goal=recall :: needs decision.find; 0, 1
run decision.goal=recall decision.find=11 :: '11'; 0, 1
run decision.recall=0.9 :: decision.recall has no effect; 'recall'
run decision.confidence=1.5 :: decision.confidence = 1.5; (0, 1)
run decision.calibrate=platt :: 'platt'; temperature
run privacy.mode=locl :: 'locl'; did you mean 'local'
run privacy.mode=central privacy.clip=0 :: privacy.clip = 0 must be above 0
run privacy.epsilon=1 :: [privacy] has no key 'epsilon'; noise
run deploy.trust=blnd :: 'blnd'; did you mean 'blind'
run model.name=mlp model.hidden=[0] :: model.hidden = 0; must be at least 1
run model.hidden=wide :: model.hidden = 'wide' must be a list, such as [1,2]
run method=fedavg :: 'method=fedavg'; section.key=value
run =3 :: '=3'; section.key=value
run x.toml lr :: 'lr'; section.key=value

# run: files
run no-such.toml :: 'no-such.toml' does not exist; runs/x
run data.clients :: data.clients; does not exist
run bad.toml :: 'bad.toml'; line 2
run list.toml :: 'run' must be a table; [run]
run ok.csv :: not valid TOML; --table
run empty :: 'empty/config.toml' does not exist; runs/x
run runs/net --resume local.lr=0.3 :: local.lr ('auto' before, 0.3 now); choose another name
run --dataset blobs data.n_max=40 --clients 2 --rounds 2 --out ok.csv :: cannot write 'ok.csv/; Not a directory
run --dataset adult --data-dir gone :: gone/adult/adult.data; FEDTAIL_OFFLINE; by hand

# run: code of one's own
run --method gone.py:Mine :: there is no file 'gone.py'
run --method mine.py:Half :: 'mine.py:Half' is not a subclass of fedtail.methods.Method
run --method boom.py:Half :: ValueError; boom.py, line 1; --debug
run --rates mine.py:Half :: 'mine.py:Half' is not a subclass
run $T --model mine.py:Half :: 'mine.py:Half' returned a Half, not a torch.nn.Module
run $T --model mine.py:Gone :: 'mine.py' has no 'Gone'; it defines: Half
run $T --model resnet18 :: takes images; (19,)
run $T --encoder efficientnet_lite0 :: model.encoder = 'efficientnet_lite0' takes images; use none

# run: tables
run $T method.depth=3 :: fedcgnm has no option 'depth'; 'depth' is an option of trees, see method.name
run $T data.exclude=y :: data.exclude names 'y', the label; leave it out
run $T data.categories=road,site :: data.categories names 'site', the site; leave it out
run --table latin.csv --label y data.encoding=ascii :: 'latin.csv'; readable as ascii; another data.encoding
run --tables unlike --label y :: site 'b': label 'odd' is not among; (no, yes); --schema; fedtail data schema
run --table gone.csv --label y :: table 'gone.csv' does not exist
run --table empty.csv --label y :: 'empty.csv' is empty; header
run --table header.csv --label y :: 'header.csv'; no rows
run --table one.csv --label y :: only one class, 'no'
run --table ragged.csv --label y :: 'ragged.csv', line 62; 4 fields; mend or drop
run --table binary.csv --label y :: 'binary.csv' is not a text table; Parquet
run --table broken.parquet --label y :: 'broken.parquet' is not a readable Parquet file
run --table empty --label y :: 'empty' is a folder; --tables
run --table t.csv :: --label; columns: key, x, road, site, y
run --table ok.csv --label z :: no label column 'z'; a, b, y
run --table t.csv --label key :: 'key'; 400 different values; bin it first
run --table t.csv --label y --site gone :: no site column 'gone'; columns: key
run --table t.csv --label y --site key :: 'key' makes 400 sites; 'site' (2 values)
run $T --schema gone.toml :: schema 'gone.toml' does not exist
run $T --schema schema.toml :: label = 3
run $T data.exclude=gone :: no column 'gone' for 'exclude'; columns: key
run $T data.categories=sit :: no column 'sit' for 'categories'; did you mean 'site'
run $T data.numbers=road :: data.numbers names column 'road'; 'a'; leave it out
run $T data.test=gone.csv :: 'gone.csv' does not exist
run $T data.test_fraction=1.5 :: data.test_fraction = 1.5; [0, 1)
run $T data.test=t.csv data.test_fraction=0.3 :: data.test_fraction = 0.3 has no effect; data.test
run --table t.csv --label y data.min_samples=2000 :: 319 samples over 5 clients; 2000 samples; smaller min_samples
run $T data.validation=2 :: data.validation = 2; [0, 1)
run $T data.pieces=-1 :: data.pieces = -1; [0, 256]
run $T data.max_levels=0 :: data.max_levels = 0 must be at least 2
run $T data.delimiter=ab :: 'ab' must be one plain character; ';'
run $T data.encoding=utf-99 :: 't.csv'; utf-99
run --tables gone --label y :: no tables at 'gone'; sites/*.csv
run --tables sites --label y :: site 'b' lacks column 'a'

# run: images
run --images gone :: 'gone' is not a folder; DIR/site/class
run --images empty :: no images; empty
run --images pictures :: pictures/p/0.png; data.skip_corrupt=true

# compare
compare --metric defect_score :: --metric defect_score; nothing found
compare --metric false_alarm_rate :: 'false_alarm_rate'; macro_f1
compare --method fedavg :: '--method'; '--methods'
compare --methods fedavg,fedavgg :: did you mean 'fedavg'
compare --methods '' :: no method given; fedtail methods
compare --methods fedavg+nope :: rate strategy 'nope'; fedhoo
compare --methods fedavg,trees+fedhoo :: rates.name = 'fedhoo'; method.power; leave it out
compare --seeds 0 :: '--seeds'; x>=1
compare --lrs 0.1,x :: --lrs '0.1,x'; positive numbers; 0.4,0.2,0.1
compare --lrs 0 :: --lrs '0'; positive numbers
compare --seeds many :: '--seeds'; 'many'
compare --methods fedavg fedprox.mu=0.1 :: 'fedprox.mu=0.1'; add it to --methods
compare --methods fedprox fedprox.muu=0.1 :: 'muu'; did you mean 'mu'
compare --workers 0 :: '--workers'; x>=1
compare --table one.csv --label y :: only one class, 'no'
compare --out ok.csv :: cannot write 'ok.csv'

# tune
tune --budget five :: --budget 'five'; 90s, 5m or 1h
tune --budget 0s :: --budget '0s'; 90s, 5m or 1h
tune --save tuned.yaml :: --save 'tuned.yaml'; .toml or .json
tune --rates 0.6 :: 'uniform' does not search; 'fedhoo'
tune --dataset blobs data.n_max=40 --clients 2 --rounds 2 --save ok.csv/r.toml :: cannot write 'ok.csv/r.toml'

# report
report :: RUN; fedtail report --help
report gone :: 'gone'; fedtail run
report empty :: 'empty' is not a run folder
report ok.csv :: 'ok.csv' is not a folder
report runs/cut :: runs/cut/result.json; not a valid JSON
report runs/net --format docx :: 'docx'; html, latex
report runs/net --out page.docx :: 'page.docx'; --format
report runs/net --baseline fedavg :: 'fedavg'; FedCGNM
report runs/net --metric macro :: did you mean 'macro_f1'
report runs/net --out ok.csv/page.html :: cannot write 'ok.csv/page.html'

# predict
predict t.csv :: '--run'; fedtail predict --help
predict --run runs/net :: 'DATA'; fedtail predict --help
predict gone.csv --run runs/net :: there is no file 'gone.csv'
predict short.csv --run runs/net :: lacks columns 'x', 'road'; it has 'key'
predict empty.csv --run runs/net :: 'empty.csv' is empty
predict pictures --run runs/net :: takes samples of shape (19,), not images
predict t.csv --run empty :: 'empty' has no model.json; run folder
predict t.csv --run ok.csv :: 'ok.csv' has no model.json; run folder
predict t.csv --run runs/cut :: runs/cut/model.safetensors; not a complete
predict t.csv --run runs/net --keep kez :: no column 'kez' for 'kept'; did you mean 'key'
predict t.csv --model runs/net --site north :: no per-site decisions; decision.scope = 'site'
predict t.csv --run runs/net --threshold rare :: --threshold 'rare'; CLASS=PROBABILITY; rare=0.2
predict t.csv --run runs/net --threshold rare=2 :: '2' is not a probability; rare=0.2
predict t.csv --run runs/net --threshold rare=high :: 'high' is not a probability; rare=0.2
predict t.csv --run runs/net --threshold rare=0.2 --threshold rare=0.9 :: 'rare' has another; one per class
predict t.csv --run runs/net --threshold foo=0.5 :: no class 'foo'; rare, usual
predict t.csv --run runs/net --decision gone.json :: 'gone.json' cannot be read
predict t.csv --run runs/net --decision x.json :: 'x.json' is not a decision; the site's own file
predict t.csv --run runs/net --coverage 0.9 :: --coverage 0.9 has no effect; --sets
predict t.csv --run runs/net --sets --coverage 0 :: coverage 0.0; 0.95
predict t.csv --run runs/net --sets --coverage 2 :: coverage 2.0; 0.95
predict t.csv --run runs/net --device tpu :: --device 'tpu'; cpu
predict t.csv --run runs/net --out ok.csv/p.csv :: cannot write 'ok.csv/p.csv'

# plan, evaluate, monitor, recalibrate, export
plan --recall 2 :: '--recall'; 0.01<=x<=0.999
plan --confidence 0.1 :: '--confidence'; 0.5<=x<=0.999
plan --counts $T --out ok.csv/p.md :: cannot write 'ok.csv/p.md'
evaluate t.csv :: '--run'; fedtail evaluate --help
evaluate new.csv --run runs/net :: no labels; --label
evaluate one.csv --run runs/net :: lacks columns 'x', 'road'
evaluate t.csv --run gone :: 'gone' has no model.json
evaluate t.csv --run gone.onnx :: there is no file 'gone.onnx'
evaluate t.csv --run mine.py:Half :: 'mine.py:Half' is code; --allow-code
evaluate t.csv --run runs/net --label gone :: no label column 'gone'
evaluate t.csv --run runs/net --label road :: no label is one of the model's classes (rare, usual); --label
evaluate t.csv --run runs/net --site gone :: no site column 'gone'
monitor t.csv --run runs/net :: 'runs/net/monitor.json'; --reference
monitor new.csv --run runs/net --reference :: no labels; --label
monitor t.csv --run runs/net --state x.json :: 'x.json' cannot be read; --reference
recalibrate short.csv --run runs/net :: lacks columns 'x', 'road'
recalibrate t.csv --run gone :: 'gone' has no model.json
export --onnx m.onnx :: 'RUN'; fedtail export --help
export runs/net :: '--onnx'; fedtail export --help
export empty --onnx m.onnx :: 'empty' has no model.json
export runs/net --onnx m.pt2 :: 'm.pt2' must end in '.onnx'
export runs/net --onnx m.onnx --site north :: no per-site decisions
export runs/net --onnx ok.csv/m.onnx :: cannot write 'ok.csv/m.onnx'

# methods, data
methods fedavg :: 'fedavg'; fedtail methods --help
methods check nope :: method 'nope'; fedcgnm
methods check mine.py:Half :: 'mine.py:Half' is not a subclass
data lst :: 'lst'; Did you mean 'list'?
data get :: 'NAMES...'; fedtail data get --help
data get digits cifr10 :: did you mean 'cifar10'
data inspect ok.csv :: 'ok.csv'; --table ok.csv --label
data inspect digits data.imbalance=0 :: imbalance = 0.0 must be at least 1
data inspect $T --rate -1 :: rate = -1.0 must be at least 0
data inspect $T --groups 0 :: groups = 0 must be at least 1
data schema t.csv :: '--label'; fedtail data schema --help
data schema t.csv --label gone :: no label column 'gone'; columns: key
data schema t.csv --label y --exclude gone :: no column 'gone' for 'exclude'
data schema t.csv --label y --out s.yaml :: --out 's.yaml'; .toml or .json
data schema ok.csv --label y --max-levels 0 :: --max-levels; x>=2

# deploy, site
deploy init d :: at least one site; --sites north,south
deploy init d --sites a,a :: must be unique; a, a
deploy init d --sites 'a b' :: site name 'a b'; letters, digits
deploy init d --sites a,b --local 2 :: --sites a,b; leave out --local 2
deploy init d --sites a,b --public nowhere :: --public 'nowhere'; host:port
deploy init d --sites a,b --own-data --images :: --own-data and --images; only one
deploy init d --local 2 --port 99999 :: 99999; 1..65535
deploy init d --local 2 run.roundss=3 :: [run] has no key 'roundss'; did you mean 'rounds'
deploy init fed --local 2 :: 'fed' already exists; another folder
deploy init ok.csv --local 2 :: 'ok.csv' already exists; another folder
deploy up TYPO :: 'TYPO' is not a deployment folder; fedtail deploy up TYPO --local 3
deploy up fed --local 5 :: 'fed' has 2 sites, not 5
deploy up fed run.rounds=3 :: 'fed' already exists; fedtail deploy run
deploy run gone :: gone' is not a deployment folder; fedtail deploy init
deploy run fed run.roundss=3 :: [run] has no key 'roundss'; did you mean 'rounds'
deploy status empty :: not a deployment folder; fedtail deploy init
deploy doctor :: --site site.toml
deploy doctor --site gone.toml :: gone.toml' does not exist
deploy doctor --site x.toml :: x.toml; 'run' is unknown; data, policy
deploy evaluate fed --run gone :: 'gone' has no model.json; run folder
deploy monitor fed --run gone :: 'gone/monitor.json'; --reference
deploy add fed site-1 :: site 'site-1' already exists; --key FILE
deploy add fed new --key ok.csv :: --key ok.csv; fedtail site keys
deploy remove fed nobody :: site 'nobody'; site-1, site-2
deploy app ok.csv :: 'ok.csv' is a file; choose a folder
site run empty :: empty/site.toml' does not exist
site health gone :: gone/site.toml' does not exist
site keys empty :: empty/site.toml' does not exist

# reproduce, bench (of the package fedtail-experiments)
reproduce table-idd :: did you mean 'table-iid'
reproduce table-groups --device gpu :: engine.device 'gpu'; cpu
reproduce table-iid --scale cup :: --scale 'cup'; did you mean 'cpu'
reproduce table-iid --only zzz :: --only zzz; Adult-10
reproduce table-iid --scale smoke --out ok.csv :: cannot write 'ok.csv/cells'
reproduce search --scale smoke --only fedavgg :: --only 'fedavgg'; did you mean 'fedavg'
reproduce search --dry-run :: 'search' takes no settings; --dry-run
reproduce gone.toml :: grid file 'gone.toml' does not exist; fedtail reproduce
bench --method nope :: method 'nope'; fedcgnm
bench --only nope :: --only 'nope'; adult
bench verify empty :: empty is not a submission; fedtail bench
"""
CASES = [
    (typed.strip(), words.split("; "))
    for typed, sign, words in (line.partition(" :: ") for line in WRONG.splitlines())
    if sign
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad tables, configs, code, images, two finished runs and a deployment."""
    folder = tmp_path_factory.mktemp("work")
    rng = np.random.default_rng(0)
    x, n = rng.normal(size=400), 400
    rows = {"key": [f"k{i}" for i in range(n)], "x": x.round(3), "road": rng.choice(["a", "b"], n)}
    good = pd.DataFrame({**rows, "site": rng.choice(["n", "s"], n), "y": np.where(x > 1, "rare", "usual")})
    good.to_csv(folder / "t.csv", index=False)
    good.drop(columns="y").to_csv(folder / "new.csv", index=False)
    good[["key"]].to_csv(folder / "short.csv", index=False)
    lines = "a,b,y\n" + "1,2,no\n3,4,yes\n" * 30
    texts = {
        "x.toml": "[run]\nrounds = 2\n", "list.toml": "run = 3\n", "bad.toml": "[run]\nrounds = = 3\n",
        "x.json": "[1]", "schema.toml": "label = 3\n", "empty.csv": "", "header.csv": "a,b,y\n", "ok.csv": lines,
        "one.csv": "a,y\n" + "1,no\n" * 30, "ragged.csv": lines + "1,2,3,no\n", "broken.parquet": "PAR1nothing",
        "mine.py": "class Half:\n    pass\n", "boom.py": "raise ValueError('boom')\n",
        "sites/a.csv": "a,y\n" + "1,no\n2,yes\n" * 20, "sites/b.csv": "b,y\n" + "1,no\n2,yes\n" * 20,
        "unlike/a.csv": "a,y\n" + "1,no\n2,yes\n" * 20, "unlike/b.csv": "a,y\n" + "1,no\n2,odd\n" * 20,
        "latin.csv": "ö,y\n" + "1,no\n2,yes\n" * 20,
        **{f"pictures/{site}/{i}.png": "no picture" for site in "pq" for i in range(9)},
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "binary.csv").write_bytes(bytes(range(256)) * 40)
    (folder / "empty").mkdir()
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name, more in (("trees", ""), ("net", "--method fedcgnm")):
            assert type_in(f"run {TABLE} --rounds 2 --name {name} -q {more}") == 0
        assert type_in("deploy init fed --local 2") == 0
    finally:
        os.chdir(before)
    shutil.copytree(folder / "runs" / "net", folder / "runs" / "cut")
    for name in ("model.safetensors", "result.json"):
        file = folder / "runs" / "cut" / name
        file.write_bytes(file.read_bytes()[:100])
    return folder


def type_in(line: str) -> int:
    """What a shell gets back from ``fedtail`` and a line, in this process."""
    before, sys.argv = sys.argv, ["fedtail", *shlex.split(line)]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.argv = before
    raise AssertionError("main() always exits")


def files(folder: Path) -> dict[str, int]:
    """Every file and folder, a file with the time of its last change."""
    found = [p for p in folder.rglob("*") if "__pycache__" not in str(p)]
    return {str(p.relative_to(folder)): 0 if p.is_dir() else p.stat().st_mtime_ns for p in found}


@pytest.mark.parametrize(("typed", "words"), CASES, ids=[typed for typed, _ in CASES])
def test_a_wrong_input_is_one_line_exit_code_two_and_leaves_nothing(
    typed: str, words: list[str], work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(work)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FEDTAIL_OFFLINE", "1")
    monkeypatch.delenv("FEDTAIL_DATA", raising=False)
    typed = typed.replace("$T", TABLE)
    there = files(work)
    capsys.readouterr()
    code = type_in(typed)
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
    assert [word for word in words if word not in err] == [], err
    assert files(work) == there
    if typed.startswith(SPEAKS_JSON):
        assert type_in(f"{typed} --json") == 2
        out, again = capsys.readouterr()
        assert json.loads(out) == {"error": again.removeprefix("error: ").rstrip("\n")}


def test_every_command_has_wrong_inputs_and_no_two_are_the_same() -> None:
    from fedtail.cli.lazy import all_commands

    typed = [line for line, _ in CASES]
    assert len(set(typed)) == len(typed) >= 122
    assert {line.split()[0] for line in typed} >= set(all_commands())
