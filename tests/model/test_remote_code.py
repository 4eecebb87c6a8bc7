"""Remote code and packaging: folders that carry our files, in fresh processes without the package or a network.

`fresh_python` runs a script in a new interpreter whose caches are empty and in which `kimi_k3` and every optional
dependency cannot be imported, so a result cannot come from anything but torch, transformers and the folder.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import kimi_k3
from kimi_k3.remote_code_kimi_k3 import CODE_FILES, copy_code
from waiting import PATIENCE

ROOT = Path(kimi_k3.__file__).parent
KERNELS = sorted(path.name for path in (ROOT / "kernels").glob("*.py"))
SHIPPED = [*CODE_FILES, *(f"kernels/{name}" for name in KERNELS)]
OPTIONAL = ("fla", "flash_attn", "einops", "triton", "causal_conv1d", "compressed_tensors", "kernels", "accelerate")

# What every script starts with; `folder`, `data`, ... are its arguments.
PREAMBLE = """
import copy, json, sys, warnings
for name in {blocked!r}:
    sys.modules[name] = None
arguments = json.loads(sys.argv[1])
import torch
import transformers
transformers.utils.logging.disable_progress_bar()
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

def origin(thing):
    module = type(thing).__module__
    return module.split(".")[0], type(thing).__name__

@torch.no_grad()
def against_golden(model, data):
    golden = load_file(data + "/golden.safetensors")
    logits = copy.deepcopy(model).double()(golden["input_ids"]).logits  # no roundings but those of the golden run
    difference = (logits - golden["logits"]).abs().max().item()
    text = model.generate(golden["input_ids"][:1], attention_mask=torch.ones_like(golden["input_ids"][:1]),
                          max_new_tokens=4, min_new_tokens=4, do_sample=False)
    same = text[0, -4:].tolist() == golden["greedy_ids"][0, :4].tolist()
    return bool(difference < 1e-3 and same and (logits.argmax(-1) == golden["logits"].argmax(-1)).all())
"""


@pytest.fixture
def fresh_python(tmp_path):
    """Function (script, hub=None, blocked=..., **arguments) -> what the script printed last, read as JSON."""
    count = 0

    def run(script, hub=None, blocked=("kimi_k3", *OPTIONAL), **arguments):
        nonlocal count
        count += 1
        home = tmp_path / f"home{count}"
        home.mkdir()
        if hub is not None:
            shutil.copytree(hub, home / "hub")
        kept = {"PYTHONPATH"} if "kimi_k3" not in blocked else set()
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in kept or not name.startswith(("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "PYTHON"))
        }
        environment |= {"HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules"), "HF_HUB_OFFLINE": "1"}
        code = PREAMBLE.format(blocked=blocked) + textwrap.dedent(script)
        texts = {name: str(value) if isinstance(value, Path) else value for name, value in arguments.items()}
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, json.dumps(texts)],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def with_code(source: Path, folder: Path, auto_map=None) -> Path:
    """A checkpoint folder that carries our files."""
    shutil.copytree(source, folder)
    (folder / "golden.safetensors").unlink()
    copy_code(folder)
    if auto_map is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    return folder


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


TEXT_AUTO_MAP = {
    "AutoConfig": "configuration_kimi_k3.KimiK3TextConfig",
    "AutoModel": "modeling_kimi_k3.KimiK3Model",
    "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForCausalLM",
    "AutoModelForSequenceClassification": "classification_kimi_k3.KimiK3ForSequenceClassification",
    "AutoModelForTokenClassification": "classification_kimi_k3.KimiK3ForTokenClassification",
}
WHOLE_AUTO_MAP = {
    "AutoConfig": "configuration_kimi_k3.KimiK3Config",
    "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    "AutoModelForImageTextToText": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    "AutoModelForSequenceClassification": "classification_kimi_k3.KimiK3MultimodalForSequenceClassification",
    "AutoModelForTokenClassification": "classification_kimi_k3.KimiK3MultimodalForTokenClassification",
}
CASES = {"k3_tiny_mxfp4": WHOLE_AUTO_MAP, "kimi_linear_flat": TEXT_AUTO_MAP}


def assert_complete(folder: Path, folder_name: str):
    """A saved folder: weights, config, code with `kernels/` in its place, and an auto_map without a repository."""
    files = files_below(folder)
    assert set(SHIPPED) <= files
    assert files - set(SHIPPED) == {"config.json", "generation_config.json", "model.safetensors"}
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"] == CASES[folder_name]
    assert "--" not in json.dumps(config["auto_map"])


# --- folders with our files


# Loads folders, or a repository of the Hub's cache by its name, and saves them with their code.
LOAD_AND_SAVE = """
def refusal(action):
    try:
        action()
    except ValueError as error:
        return str(error)

result = {}
for name, (folder, data, target) in arguments["folders"].items():
    found = [origin(AutoConfig.from_pretrained(folder, trust_remote_code=True))]
    for auto in (AutoModel, AutoModelForCausalLM):
        model = auto.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
        found.append(origin(model))
    right = against_golden(model, data)
    scorer = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, num_labels=3)
    found.append([*origin(scorer), scorer(torch.tensor([[5, 6, 7]])).logits.shape[1]])
    ids = load_file(data + "/golden.safetensors")["input_ids"]
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        sdpa = exact(ids).logits
        exact.set_attn_implementation("eager")
        eager = exact(ids).logits
    agree = (sdpa - eager).abs().max().item() < 1e-9
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    refused = refusal(lambda: model.save_pretrained(target + "-pushed", push_to_hub=True))
    model.save_pretrained(target)
    result[name] = [found, right, agree, refused]
repository, data, target = arguments["repository"]
model = AutoModelForCausalLM.from_pretrained(repository, trust_remote_code=True, dtype=torch.float32)
model.save_pretrained(target)
print(json.dumps([result, [*origin(model), against_golden(model, data)]]))
"""

# Loads folders that were saved, and saves them again.
RELOAD = """
from pathlib import Path
result = {}
for name, (folder, data) in arguments["folders"].items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    model.save_pretrained(folder + "-again")
    code = Path(sys.modules[type(model).__module__].__file__).parent
    files = sorted(str(path.relative_to(code)) for path in code.rglob("*.py"))
    result[name] = [*origin(model), against_golden(model, data), files]
print(json.dumps(result))
"""


def saved_by_the_installed_package(data_dir, out):
    """name -> checkpoint of folders saved by this process, one by a class that was registered for an Auto class."""
    for name in CASES:
        model = AutoModelForCausalLM.from_pretrained(data_dir / name)
        assert type(model).__module__.startswith("kimi_k3.")
        model.save_pretrained(out / f"{name}-installed")
        assert_complete(out / f"{name}-installed", name)
    registered = type(
        "KimiK3ForCausalLM", (kimi_k3.KimiK3ForCausalLM,), {"__module__": kimi_k3.modeling_kimi_k3.__name__}
    )
    registered.register_for_auto_class("AutoModelForCausalLM")
    registered.from_pretrained(data_dir / "k3_dense_flat").save_pretrained(out / "registered")
    assert set(SHIPPED) <= files_below(out / "registered")
    assert not any((out / "registered" / name).exists() for name in KERNELS), "no flat copies"
    return {f"{name}-installed": name for name in CASES} | {"registered": "k3_dense_flat"}


def test_folders_with_our_files_need_nothing_else(data_dir, tmp_path, fresh_python):
    """Faults 27, 28, 83: load with trust_remote_code, save, delete the source, reload in a fresh offline process.

    From a folder and by the name on the Hub, which leaves no `repo--` in auto_map; saved by the installed package, and
    with `register_for_auto_class`, which flattens folders.
    Faults 14, 16, 24: without fla, flash-attn, einops, triton, compressed-tensors; sdpa and eager agree.
    """
    repository, saved = tmp_path / "hub" / "models--someone--k3-tiny", tmp_path / "saved"
    with_code(data_dir / "k3_tiny_mxfp4", repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    folders = {}
    for name in CASES:
        source = with_code(data_dir / name, tmp_path / "source" / name, auto_map=CASES[name])
        folders[name] = [str(path) for path in (source, data_dir / name, saved / name)]
    by_name = ["someone/k3-tiny", str(data_dir / "k3_tiny_mxfp4"), str(saved / "from-hub")]
    first, from_hub = fresh_python(LOAD_AND_SAVE, hub=tmp_path / "hub", folders=folders, repository=by_name)
    shutil.rmtree(tmp_path / "source")
    for name, (found, right, agree, refused) in first.items():
        classes = [CASES[name][auto].split(".")[1] for auto in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")]
        assert found[:3] == [["transformers_modules", class_name] for class_name in classes]
        assert found[3] == ["transformers_modules", CASES[name]["AutoModelForSequenceClassification"].split(".")[1], 3]
        assert right and agree
        assert "use model.push_to_hub(repo_id)" in refused and not (saved / f"{name}-pushed").exists()
        assert_complete(saved / name, name)
        assert (saved / name / "model.safetensors").stat().st_size > 0
    assert from_hub == ["transformers_modules", "KimiK3ForConditionalGeneration", True]
    assert_complete(saved / "from-hub", "k3_tiny_mxfp4")
    assert "someone" not in (saved / "from-hub" / "config.json").read_text()

    checkpoints = {name: name for name in CASES} | {"from-hub": "k3_tiny_mxfp4"}
    checkpoints |= saved_by_the_installed_package(data_dir, saved)
    folders = {name: [str(saved / name), str(data_dir / source)] for name, source in checkpoints.items()}
    again = fresh_python(RELOAD, folders=folders)
    assert set(first) == set(CASES) and set(again) == set(checkpoints)
    for name, (module, class_name, right, files) in again.items():
        kind = "ConditionalGeneration" if checkpoints[name] == "k3_tiny_mxfp4" else "CausalLM"
        assert [module, class_name] == ["transformers_modules", f"KimiK3For{kind}"]
        assert right, name
        if name != "registered":
            assert set(files) - {"__init__.py", "kernels/__init__.py"} == set(SHIPPED)
            assert_complete(saved / f"{name}-again", checkpoints[name])


# Reads a picture, and an image of the golden run, from a folder alone.
READ_AN_IMAGE = """
from transformers import AutoModelForImageTextToText
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # 5.17 hides it without torchvision
folder, data, picture = arguments["folder"], arguments["data"], arguments["picture"]
model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).double()
golden = load_file(data + "/golden.safetensors")
images = {"pixel_values": golden["pixel_values"][:24], "grid_thws": golden["grid_thws"][:1]}
with torch.no_grad():
    logits = model(golden["single.input_ids"], attention_mask=golden["single.attention_mask"], **images).logits
right = (logits - golden["single.logits"]).abs().max().item() < 3e-4
processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
processor.save_pretrained(folder + "-again")
pixels = AutoImageProcessor.from_pretrained(folder + "-again", trust_remote_code=True)(picture)["pixel_values"]
expected = load_file(arguments["pictures"])["gradient_rgb.pixel_values"]
print(json.dumps([*origin(model), right, *origin(processor), torch.equal(pixels, expected)]))
"""


def test_a_folder_with_our_files_reads_images(data_dir, tmp_path, fresh_python):
    data, pictures, saved = data_dir / "k3_vision" / "small_signal", data_dir / "k3_images", tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(data).save_pretrained(saved)
    assert json.loads((saved / "config.json").read_text())["auto_map"] == WHOLE_AUTO_MAP
    kimi_k3.KimiK3ImageProcessor().save_pretrained(saved)
    kimi_k3.KimiK3ImageProcessor().save_pretrained(tmp_path / "processor")
    assert files_below(tmp_path / "processor") == {"preprocessor_config.json", "image_processing_kimi_k3.py"}
    files = {"picture": pictures / "gradient_rgb.png", "pictures": pictures / "golden.safetensors"}
    found = fresh_python(READ_AN_IMAGE, folder=saved, data=data, **files)
    assert found[:3] == ["transformers_modules", "KimiK3ForConditionalGeneration", True]
    assert found[3:] == ["transformers_modules", "KimiK3ImageProcessor", True]


def test_push_to_hub_uploads_the_whole_tree(data_dir, monkeypatch):
    """`model.push_to_hub` saves first and uploads then; the flag of `save_pretrained` would upload too early."""
    from transformers.utils import hub

    uploaded = []

    class Hub:
        def create_repo(self, repo_id, **kwargs):
            return type("Repository", (), {"repo_id": repo_id})

        def create_commit(self, operations, **kwargs):
            uploaded.extend(operation.path_in_repo for operation in operations)

    class Card:
        def save(self, path):
            Path(path).write_text("")

    monkeypatch.setattr(hub, "hf_api", Hub)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: Card())
    model = AutoModelForCausalLM.from_pretrained(data_dir / "kimi_linear_flat")
    model.push_to_hub("someone/kimi-linear")
    assert set(uploaded) == {*SHIPPED, "config.json", "generation_config.json", "model.safetensors", "README.md"}


@pytest.mark.parametrize("model_class", [kimi_k3.KimiK3Model, kimi_k3.KimiK3ForCausalLM])
def test_save_with_the_push_flag_is_refused_before_anything_is_written(model_class, data_dir, tmp_path):
    model = model_class.from_pretrained(data_dir / "kimi_linear_flat")
    with pytest.raises(ValueError, match=r"use model\.push_to_hub\(repo_id\)"):
        model.save_pretrained(tmp_path / "saved", push_to_hub=True)
    assert not (tmp_path / "saved").exists()


def test_save_over_the_folder_that_was_loaded(data_dir, tmp_path):
    """Fault 27: a training run writes into one folder again and again."""
    model = AutoModelForCausalLM.from_pretrained(data_dir / "kimi_linear_flat")
    for _ in range(2):
        model.save_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_complete(tmp_path, "kimi_linear_flat")


# --- versions


def test_unsupported_transformers_is_refused_in_one_sentence(data_dir, tmp_path, fresh_python):
    """Fault 20: an older or newer major gives one clear sentence, installed or as remote code; the range is open to
    newer 5.x releases."""
    folder = with_code(data_dir / "k3_tiny_mxfp4", tmp_path / "folder")
    versions = ["4.57.6", "5.16.2", "6.0.0", "6.1.0.dev0", "5.17.0", "5.99.1"]
    results = fresh_python(
        """
        def attempt(version, action):
            transformers.__version__ = version
            for name in [name for name in sys.modules if name.startswith(("kimi_k3", "transformers_modules."))]:
                del sys.modules[name]
            try:
                action()
                return None
            except ImportError as error:
                return str(error)

        # The folder first: once the package was imported, its classes come before those of a folder.
        load = lambda: AutoConfig.from_pretrained(arguments["folder"], trust_remote_code=True)
        remote = {v: attempt(v, load) for v in arguments["versions"]}
        installed = {v: attempt(v, lambda: __import__("kimi_k3")) for v in arguments["versions"]}
        print(json.dumps([remote, installed]))
        """,
        blocked=OPTIONAL,
        folder=folder,
        versions=versions,
    )
    for way in results:
        for version in versions[:4]:
            sentence = way[version]
            assert sentence is not None, version
            assert f"supports transformers >=5.17.0,<6, but {version} is installed" in sentence
            assert "\n" not in sentence
        assert way["5.17.0"] is way["5.99.1"] is None


# --- what the source may not do


def tree_of(name):
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["__init__.py", *SHIPPED])
def test_imports_only_torch_and_transformers(name):
    """Faults 16, 24: fla, flash-attn, einops, triton, compressed-tensors are never needed at import.

    An import inside `try` is a choice, not a need; `packaging` and `safetensors` are requirements of transformers.
    """
    allowed = {"torch", "transformers", "packaging", "safetensors", *sys.stdlib_module_names}

    def outside_try(node):
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.Try):
                yield child
                yield from outside_try(child)

    for node in outside_try(tree_of(name)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module]
        else:
            continue
        for module in modules:
            assert module.split(".")[0] in allowed, f"line {node.lineno} imports {module}"


# peft has no way in for layers of others that adapters of all kinds pass through. What is put around its functions is
# put there behind its own import, once in a process, and calls the original for every model that is not ours.
TAUGHT = {"lora_kimi_k3.py": {"LoraModel", "AdaLoraModel", "BaseTuner", "hotswap", "peft"}}


@pytest.mark.parametrize("name", ["__init__.py", *SHIPPED])
def test_no_monkey_patch(name):
    """Fault 14: nothing that another library owns is assigned to, so import order and versions cannot matter.

    But for `warnings.showwarning`, which Python documents as the place to assign to, and `catch_warnings` puts back.
    """
    tree = tree_of(name)
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for alias in node.names
    } - TAUGHT.get(name, set())
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            targets = [ast.Attribute(node.args[0], "", ast.Store())]
        for target in targets:
            if ast.unparse(target) == "warnings.showwarning":
                continue
            while isinstance(target, (ast.Attribute, ast.Subscript)):
                target = target.value
                assert not (isinstance(target, ast.Name) and target.id in foreign), f"line {node.lineno}"


@pytest.mark.parametrize("name", SHIPPED)
def test_no_device_is_named(name):
    """Fault 81: no `cuda` in model code, neither as a string nor as `torch.cuda` or `.cuda()`."""
    tree = tree_of(name)
    texts = {id(node.body[0].value) for node in ast.walk(tree) if ast_has_docstring(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            assert "cuda" not in node.value, f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr != "cuda", f"line {node.lineno}"


def ast_has_docstring(node):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node) is not None


def test_manifest_lists_every_file_the_loader_must_carry():
    """The loader finds files by reading text, and only those of `from .kernels/x import` form below `kernels/`."""
    from transformers.dynamic_module_utils import get_relative_import_files

    for start in ("modeling_kimi_k3.py", "classification_kimi_k3.py"):  # what an Auto class is given
        found = {str(Path(file).relative_to(ROOT)) for file in get_relative_import_files(ROOT / start)}
        assert found | {start} == set(SHIPPED)


def test_root_does_not_shadow_the_distribution_named_kernels(tmp_path):
    """transformers imports the PyPI package `kernels` when it is there; our folder of that name must never win."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("REGULAR = True\n")
    script = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import kernels; print(kernels.REGULAR)"
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "True", done.stderr


@torch.no_grad()
def test_installed_package_and_a_folders_copy_live_in_one_process(data_dir, tmp_path, monkeypatch):
    """With `import kimi_k3` the folder's own files are not run, whatever trust_remote_code says, and results agree."""
    folder = with_code(data_dir / "kimi_linear_flat", tmp_path / "folder", auto_map=TEXT_AUTO_MAP)
    (folder / "modeling_kimi_k3.py").write_text("raise RuntimeError('the copy was run')\n")
    for trust in (None, True):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
        assert type(model) is kimi_k3.KimiK3ForCausalLM
