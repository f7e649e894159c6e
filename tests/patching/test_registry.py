import functools
import importlib
import importlib.util
import inspect
import logging
import pickle
import sys
import threading
from contextlib import contextmanager

import pytest

from mcore_ckpt_ext.patching.import_hook import PostImportFinder
from mcore_ckpt_ext.patching.patch_point import PatchPoint
from mcore_ckpt_ext.patching.registry import HookRegistry

STOCK = ("stock", "m")
OURS = ("ours", "stock", "m")


@pytest.fixture
def registry(framework):
    yield from _registry(framework)


def _registry(framework, **differences):
    wanted = {
        "locations": (f"{framework.name}.checkpointing:load",),
        "wrapper": f"{framework.name}.wrappers:wrap",
        "parameters": ("optimizer", "strict"),
        "version_module": framework.name,
    }
    made = HookRegistry([PatchPoint(**{**wanted, **differences})])
    before = list(sys.meta_path)
    yield made
    made.uninstall()
    assert sys.meta_path == before


def _import(framework, module):
    return importlib.import_module(f"{framework.name}.{module}")


def _load(framework):
    return framework.loaded("checkpointing").load("m", "o")


def test_a_module_imported_later_is_patched(registry, framework):
    assert registry.status()[0].reason == "the hooks are not installed"
    registry.install()
    assert registry.status()[0].state == "waiting for import"
    assert f"{framework.name}.wrappers" not in sys.modules
    training = _import(framework, "training")
    assert training.train() == OURS
    (status,) = registry.status()
    assert (status.patch_point, status.state) == (f"{framework.name}.checkpointing.load", "patched")
    assert (status.version, status.reason) == ("1.2.3", None)
    assert framework.loaded("checkpointing").untouched() == "stock"


def test_a_late_installation_reaches_those_who_imported_by_name(registry, framework):
    training = _import(framework, "training")
    assert training.train() == STOCK
    registry.install()
    assert training.train() == OURS
    assert _load(framework) == OURS


@pytest.mark.parametrize("late", [False, True])
def test_uninstalling_gives_back_the_original_everywhere(registry, framework, late):
    if late:
        _import(framework, "training")
        original = framework.loaded("checkpointing").load
    registry.install()
    training = _import(framework, "training")
    patched = framework.loaded("checkpointing").load
    registry.uninstall()
    assert training.train() == STOCK
    assert training.load is framework.loaded("checkpointing").load is not patched
    if late:
        assert training.load is original
    assert patched("m", "o") == STOCK
    assert registry.status()[0].reason == "the hooks are not installed"


def test_installing_twice_wraps_once(registry, framework):
    registry.install()
    _import(framework, "training")
    finders = list(sys.meta_path)
    registry.install()
    assert _load(framework) == OURS
    assert sys.meta_path == finders


def test_installing_again_after_uninstalling_wraps_once(registry, framework):
    _import(framework, "training")
    for _ in range(3):
        registry.install()
        assert framework.loaded("training").train() == OURS
        registry.uninstall()
    assert framework.loaded("training").train() == STOCK


def test_after_uninstalling_a_new_import_is_stock(registry, framework):
    registry.install()
    registry.uninstall()
    assert _import(framework, "training").train() == STOCK


def test_a_reload_is_patched_again(registry, framework):
    registry.install()
    module = _import(framework, "checkpointing")
    framework.write("checkpointing", "def load(model, optimizer, strict=True):\n    return ('new stock', model)\n")
    assert importlib.reload(module) is module
    assert _load(framework) == ("ours", "new stock", "m")
    registry.uninstall()
    assert _load(framework) == ("new stock", "m")


def test_a_reload_that_no_longer_fits_is_left_alone(registry, framework):
    registry.install()
    module = _import(framework, "checkpointing")
    framework.write("checkpointing", "def load(path):\n    return 'other'\n")
    importlib.reload(module)
    assert module.load("p") == "other"
    assert registry.status()[0].state == "not patched"


def test_a_reload_that_fits_again_is_patched(registry, framework):
    fits = (framework.folder / "checkpointing.py").read_text()
    framework.write("checkpointing", "load = 3")
    registry.install()
    module = _import(framework, "checkpointing")
    assert registry.status()[0].state == "not patched"
    framework.write("checkpointing", fits)
    importlib.reload(module)
    assert _load(framework) == OURS
    assert (registry.status()[0].state, registry.status()[0].reason) == ("patched", None)


def test_a_reload_that_keeps_our_function_does_not_wrap_it_again(registry, framework):
    framework.write(
        "checkpointing", "if 'load' not in globals():\n    def load(m, optimizer, strict=True): return ('stock', m)\n"
    )
    registry.install()
    importlib.reload(_import(framework, "checkpointing"))
    assert _load(framework) == OURS


def test_a_reloaded_module_is_patched(registry, framework):
    registry.install()
    _import(framework, "checkpointing")
    del sys.modules[f"{framework.name}.checkpointing"]
    _import(framework, "checkpointing")
    assert _load(framework) == OURS


def test_the_module_shows_no_trace(registry, framework):
    registry.install()
    module = _import(framework, "checkpointing")
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
    assert module.__file__ == module.__spec__.origin == str(framework.folder / "checkpointing.py")
    assert "def untouched" in inspect.getsource(module)
    assert 'return ("stock", model)' in inspect.getsource(module.load)
    assert list(inspect.signature(module.load).parameters) == ["model", "optimizer", "strict"]
    assert module.load.__doc__ == "Load."
    assert pickle.loads(pickle.dumps(module.load)) is module.load


def test_looking_for_a_spec_patches_nothing(registry, framework):
    registry.install()
    spec = importlib.util.find_spec(f"{framework.name}.checkpointing")
    assert "def load" in spec.loader.get_source(spec.name)
    assert registry.status()[0].state == "waiting for import"


def test_an_import_error_of_the_framework_is_its_own(registry, framework):
    framework.write("checkpointing", "raise OSError('its own')")
    registry.install()
    with pytest.raises(OSError, match="its own"):
        _import(framework, "checkpointing")
    with pytest.raises(ModuleNotFoundError):
        _import(framework, "no_such_module")


@contextmanager
def listening(caplog):
    """The package's logger does not pass on what it writes itself."""
    logger = logging.getLogger("mcore_ckpt_ext")
    logger.addHandler(caplog.handler)
    propagated, logger.propagate = logger.propagate, False
    yield
    logger.propagate = propagated
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def load(model, strict, optimizer): return 'stock'", "found (model, strict, optimizer)"),
        ("def load(*args, **kwargs): return 'stock'", "found (args, kwargs)"),
        ("def other(): pass", "has no function load"),
        ("load = 3", "has no function load"),
    ],
)
def test_an_unexpected_target_is_left_alone_and_reported_once(registry, framework, caplog, source, reason):
    framework.write("checkpointing", source)
    registry.install()
    with caplog.at_level(logging.WARNING, "mcore_ckpt_ext"), listening(caplog):
        module = _import(framework, "checkpointing")
        registry.install()
    before = {}
    exec(source, before)
    assert type(getattr(module, "load", None)) is type(before.get("load"))
    if callable(before.get("load")):
        assert module.load(1, 2, 3) == "stock"
    (status,) = registry.status()
    assert status.state == "not patched"
    assert reason in status.reason
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_patch_points_with_the_same_reason_are_logged_in_one_line(framework, caplog):
    module, wrapper = f"{framework.name}.checkpointing", f"{framework.name}.wrappers:wrap_badly"
    registry = HookRegistry([PatchPoint((f"{module}:{name}",), wrapper) for name in ("load", "untouched")])
    try:
        with listening(caplog):
            registry.install()
            _import(framework, "checkpointing")
    finally:
        registry.uninstall()
    (record,) = caplog.records
    assert f"{module}.load, {module}.untouched are left as they are: RuntimeError" in record.getMessage()


def test_only_the_first_rank_logs(registry, framework, caplog, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    framework.write("checkpointing", "load = 3")
    registry.install()
    with listening(caplog):
        _import(framework, "checkpointing")
    assert registry.status()[0].state == "not patched"
    assert not caplog.records


@pytest.mark.parametrize(
    ("wrapper", "reason"),
    [
        ("wrap_badly", "RuntimeError: no wrapper today"),
        ("wrap_with_nothing", "returned None"),
        ("absent", "AttributeError"),
    ],
)
def test_a_failing_wrapper_factory_leaves_stock(framework, wrapper, reason):
    for registry in _registry(framework, wrapper=f"{framework.name}.wrappers:{wrapper}"):
        registry.install()
        assert _import(framework, "training").train() == STOCK
        (status,) = registry.status()
        assert status.state == "not patched"
        assert reason in status.reason


def test_an_absent_wrapper_module_leaves_stock(framework):
    for registry in _registry(framework, wrapper="no_such_package:wrap"):
        registry.install()
        assert _import(framework, "training").train() == STOCK
        assert "ModuleNotFoundError" in registry.status()[0].reason


def test_an_uninstall_in_the_middle_of_patching_leaves_stock(framework, monkeypatch):
    for registry in _registry(framework):

        def wrap(original, uninstall=registry.uninstall):
            uninstall()
            return _theirs(original)

        monkeypatch.setattr(_import(framework, "wrappers"), "wrap", wrap)
        registry.install()
        assert _import(framework, "training").train() == STOCK
        assert registry.status()[0].state == "not patched"


def test_someone_who_patches_while_we_do_is_not_overwritten(registry, framework, monkeypatch):
    def wrap(original):
        module = framework.loaded("checkpointing")
        module.load = _theirs(original)
        return original

    monkeypatch.setattr(_import(framework, "wrappers"), "wrap", wrap)
    registry.install()
    assert _import(framework, "training").train() == ("theirs", *STOCK)
    assert registry.status()[0].state == "not patched"


def test_a_name_without_patch_points_is_not_found_by_our_finder(framework):
    finder = PostImportFinder({f"{framework.name}.checkpointing"}, lambda name, module: None)
    package = _import(framework, "training").__spec__.parent
    path = sys.modules[package].__path__
    assert finder.find_spec(f"{framework.name}.checkpointing", path) is not None
    assert finder.find_spec(f"{framework.name}.training", path) is None


def _theirs(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return ("theirs", *function(*args, **kwargs))

    return wrapper


def test_someone_on_top_of_us_survives_our_uninstall(registry, framework):
    registry.install()
    module = _import(framework, "checkpointing")
    module.load = on_top = _theirs(module.load)
    assert module.load("m", "o") == ("theirs", *OURS)
    assert "wrapped by another package" in registry.status()[0].reason
    registry.install()
    assert module.load is on_top
    registry.uninstall()
    assert module.load is on_top
    assert module.load("m", "o") == ("theirs", *STOCK)
    registry.install()
    assert module.load("m", "o") == ("ours", "theirs", *STOCK)


def test_someone_below_us_survives_our_uninstall(registry, framework):
    module = _import(framework, "checkpointing")
    module.load = below = _theirs(module.load)
    registry.install()
    assert module.load("m", "o") == ("ours", "theirs", *STOCK)
    registry.uninstall()
    assert module.load is below


def test_two_registries_do_not_disturb_each_other(registry, framework):
    for other in _registry(framework):
        registry.install()
        other.install()
        training = _import(framework, "training")
        assert training.train() == ("ours", *OURS)
        registry.uninstall()
        assert training.train() == OURS


def test_a_finder_that_calls_all_finders_again_does_not_recurse(registry, framework, monkeypatch):
    class Asker:
        def find_spec(self, name, path, target=None):
            if name.startswith(framework.name) and not getattr(self, "asking", False):
                self.asking = True
                try:
                    return importlib.util.find_spec(name)
                finally:
                    self.asking = False
            return None

    for place in (0, 1):
        registry.install()
        asker = Asker()
        sys.meta_path.insert(place, asker)
        try:
            assert _import(framework, "training").train() == OURS
        finally:
            sys.meta_path.remove(asker)
            registry.uninstall()
            for module in ("training", "checkpointing"):
                del sys.modules[f"{framework.name}.{module}"]


def test_threads_that_import_and_install_at_once_wrap_once(registry, framework):
    framework.write(
        "checkpointing", "import time\ntime.sleep(0.2)\n" + (framework.folder / "checkpointing.py").read_text()
    )
    start = threading.Barrier(8)
    results, errors = [], []

    def work(index):
        try:
            start.wait(10)
            registry.install()
            results.append(_import(framework, "training").train())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert results == [OURS] * 8
    assert registry.status()[0].state == "patched"


def test_modules_that_import_things_when_touched_are_not_touched(registry, framework):
    class Touchy(type(sys)):
        def __getattribute__(self, name):
            raise AssertionError(f"{name} was asked of a lazy module")

    sys.modules[f"{framework.name}.lazy"] = Touchy("lazy")
    sys.modules[f"{framework.name}.odd"] = 3
    _import(framework, "training")
    registry.install()
    assert framework.loaded("training").train() == OURS


def test_objects_that_imitate_modules_are_ignored(registry, framework):
    """A library of cffi (`_cffi_backend.Lib`) does, and has no namespace."""

    class Library:
        __slots__ = ()
        __class__ = type(sys)

    sys.modules[f"{framework.name}.library"] = Library()
    _import(framework, "training")
    registry.install()
    assert framework.loaded("training").train() == OURS


def test_errors_of_the_wrapper_are_of_the_types_that_the_framework_raises(framework):
    framework.write(
        "wrappers",
        "from mcore_ckpt_ext.errors import CheckpointError\n"
        "def wrap(original):\n"
        "    def load(model, optimizer, strict=True):\n"
        "        raise CheckpointError('refused')\n"
        "    return load\n",
    )
    made = _registry(framework, raises=("builtins:LookupError",))
    next(made).install()
    _import(framework, "checkpointing")
    with pytest.raises(LookupError, match="refused"):
        _load(framework)
    next(made, None)


MOVED = ("{name}.checkpointing:load_all", "{name}.checkpointing:load", "{name}.elsewhere:load")


def _moved(framework, **differences):
    locations = tuple(location.format(name=framework.name) for location in MOVED)
    return _registry(framework, **{"locations": locations, **differences})


@pytest.mark.parametrize("module", ["checkpointing", "elsewhere"])
@pytest.mark.parametrize("late", [False, True])
def test_a_function_that_was_renamed_or_moved_is_wrapped_without_a_warning(framework, caplog, module, late):
    source = (framework.folder / "checkpointing.py").read_text()
    for name in ("checkpointing", "elsewhere"):
        framework.write(name, source if name == module else "def untouched(): pass")
    for registry in _moved(framework):
        with listening(caplog):
            if late:
                _import(framework, module)
            registry.install()
            for name in ("checkpointing", "elsewhere"):
                _import(framework, name)
        assert framework.loaded(module).load("m", "o") == OURS
        (status,) = registry.status()
        assert (status.patch_point, status.state) == (f"{framework.name}.checkpointing.load_all", "patched")
        assert not caplog.records


def test_a_function_that_is_nowhere_is_reported(framework, caplog):
    framework.write("checkpointing", "def untouched(): pass")
    for registry in _moved(framework):
        registry.install()
        with listening(caplog):
            _import(framework, "checkpointing")
        (status,) = registry.status()
        assert (status.state, len(caplog.records)) == ("not patched", 1)
        assert f"{framework.name}.checkpointing has no function load_all or load" in status.reason


def test_a_module_that_may_still_be_imported_is_waited_for(framework, caplog):
    framework.write("checkpointing", "def untouched(): pass")
    framework.write("elsewhere", "def load(): pass")
    for registry in _moved(framework):
        registry.install()
        with listening(caplog):
            _import(framework, "checkpointing")
        assert registry.status()[0].state == "waiting for import"
        with listening(caplog):
            _import(framework, "elsewhere")
        assert "expected the parameters" in registry.status()[0].reason
        assert len(caplog.records) == 1


def test_of_two_names_in_a_module_the_newest_is_wrapped(framework):
    framework.write("checkpointing", "def load_all(m, optimizer, strict): return 'stock', m\nload = load_all\n")
    for registry in _moved(framework):
        registry.install()
        module = _import(framework, "checkpointing")
        assert module.load_all("m", "o", True) == OURS
        assert module.load("m", "o", True) == STOCK


@pytest.mark.parametrize(("version", "state"), [("0.16.1", "not needed"), ("0.17.0", "not patched")])
def test_a_function_that_came_later_is_not_missed(framework, version, state):
    (framework.folder / "__init__.py").write_text(f"__version__ = {version!r}")
    location = f"{framework.name}.checkpointing:get_write_results_queue"
    for registry in _registry(framework, locations=(location,), parameters=()):
        registry.install()
        _import(framework, "checkpointing")
        assert registry.status()[0].state == state


@pytest.mark.parametrize(
    ("version", "reads", "missing"),
    [
        ("0.15.0", ("untouched", "set_loaded_iteration"), None),
        ("0.16.0", ("untouched", "set_loaded_iteration"), "set_loaded_iteration"),
        ("0.16.0", ("unwrap_model", "get_args"), "unwrap_model, {name}.checkpointing.get_args"),
        ("0.16.0", ("{name}.checkpointing:untouched", "{name}.not_imported:load"), None),
        ("0.16.0", ("{name}.checkpointing:get_args",), "get_args"),
        (None, ("set_loaded_iteration",), "set_loaded_iteration"),
    ],
)
def test_names_that_a_wrapper_reads_are_checked_where_the_original_is_defined(framework, version, reads, missing):
    (framework.folder / "__init__.py").write_text("" if version is None else f"__version__ = {version!r}")
    for registry in _registry(framework, reads=tuple(read.format(name=framework.name) for read in reads)):
        module = _import(framework, "checkpointing")
        module.load = _theirs(module.load)
        registry.install()
        (status,) = registry.status()
        assert status.state == ("patched" if missing is None else "not patched")
        expected = f"there is no {{name}}.checkpointing.{missing}, which the wrapper needs".format(name=framework.name)
        assert status.reason == (None if missing is None else expected)
