"""The disk cache: trust, verification, degradation, two processes at once, eviction.

Tests may run as root, whom no mode bits stop: what only others meet is tried in a subprocess that
has dropped its privileges, or by making the one system call fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from dicp import store as store_module
from dicp.cache import Cache, CacheInfo, Entry, KindInfo, key_of
from dicp.config import Config
from dicp.errors import CacheWarning

KEY = key_of("entry")
FILES = {"a.txt": b"alpha", "b.bin": bytes(range(256))}
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(folder: Path) -> Cache:
    return reopened(folder)


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    """A test that expects no warning fails on one; `pytest.warns` still collects."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


def reopened(folder: Path, max_bytes: int = 2**30) -> Cache:
    """A cache as a new process would open it."""
    return Cache(folder, max_bytes)


def entry_folder(folder: Path, key: str = KEY) -> Path:
    return folder / "art" / key[:2] / key


def fail_with(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


# Keys


def test_key_is_stable() -> None:
    assert key_of("a", {"b": [1, None, True, 2.5]}, b"c") == (
        key_of("a", {"b": (1, None, True, 2.5)}, b"c")
    )
    assert len(key_of()) == 64 and set(key_of()) <= set("0123456789abcdef")
    assert key_of({"x": 1, "y": 2}) == key_of({"y": 2, "x": 1})
    assert key_of({"x", "y"}) == key_of({"y", "x"})


def test_different_parts_have_different_keys() -> None:
    values: list[tuple[object, ...]] = [
        (),
        ("",),
        ("", ""),
        ("ab",),
        ("a", "b"),
        (["a", "b"],),
        (["a"], ["b"]),
        (["ab"],),
        (b"ab",),
        ({"a": "b"},),
        ({"b": "a"},),
        ({"a", "b"},),
        ("1",),
        (1,),
        (1.0,),
        (True,),
        (None,),
        ("None",),
        ("s1:a",),
    ]
    assert len({key_of(*value) for value in values}) == len(values)


def test_key_of_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="a cache key cannot be made of object"):
        key_of(object())


# Entries


def test_put_and_get(cache: Cache, folder: Path) -> None:
    assert cache.get("art", KEY) is None
    built = cache.put("art", KEY, FILES)
    found = reopened(folder).get("art", KEY)
    assert not built.hit and found is not None and found.hit
    for entry in (built, found):
        assert entry.read("b.bin") == FILES["b.bin"]
        assert entry.path("a.txt").read_bytes() == b"alpha"
        assert entry.path("a.txt").parent == entry_folder(folder)
    assert sorted(os.listdir(entry_folder(folder))) == ["a.txt", "b.bin", "manifest.json"]
    with pytest.raises(KeyError):
        found.read("c")
    with pytest.raises(KeyError):
        found.path("c")


def test_put_replaces(cache: Cache) -> None:
    cache.put("art", KEY, FILES)
    cache.put("art", KEY, {"other": b"1"})
    found = cache.get("art", KEY)
    assert found is not None and dict(found.files) == {"other": b"1"}


def test_everything_is_private_to_the_user(cache: Cache, folder: Path) -> None:
    mask = os.umask(0)
    try:
        cache.get_or_build("art", KEY, lambda: FILES)
    finally:
        os.umask(mask)
    for path in (folder, *folder.rglob("*")):
        assert not path.stat().st_mode & 0o077, path


def test_nothing_is_left_behind(cache: Cache, folder: Path) -> None:
    cache.get_or_build("art", KEY, lambda: FILES)
    cache.put("art", KEY, FILES)
    assert os.listdir(folder / "tmp") == []


def test_open_shares_one_cache_per_folder(folder: Path) -> None:
    config = Config(cache_dir=folder)
    assert Cache.open(config) is Cache.open(config)


def test_switched_off_keeps_nothing(folder: Path) -> None:
    config = Config(cache_dir=folder, cache=False)
    cache = Cache.open(config)
    entry = cache.get_or_build("art", KEY, lambda: FILES)
    assert entry.path("a.txt").read_bytes() == b"alpha"
    assert not folder.exists()
    assert Cache.open(config).get("art", KEY) is None


def test_private_folder_goes_with_its_last_entry(folder: Path) -> None:
    entry = Cache.open(Config(cache_dir=folder, cache=False)).put("art", KEY, FILES)
    path = entry.path("a.txt")
    assert path.is_file()
    del entry
    assert not path.exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", ".x", "a\0b", "a b", "manifest.json"])
def test_file_names_cannot_leave_the_entry(cache: Cache, name: str) -> None:
    with pytest.raises(ValueError):
        cache.put("art", KEY, {name: b""})


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_kinds_and_keys_cannot_leave_the_folder(cache: Cache, name: str) -> None:
    with pytest.raises(ValueError):
        cache.get(name, KEY)
    with pytest.raises(ValueError):
        cache.get("art", name)


@pytest.mark.parametrize("kind", ["tmp", "locks", "user.key"])
def test_the_caches_own_names_are_no_kinds(cache: Cache, kind: str) -> None:
    with pytest.raises(ValueError, match="is not a cache kind: the cache itself uses this name"):
        cache.put(kind, KEY, FILES)


def test_an_entry_outlives_its_files(cache: Cache) -> None:
    entry = cache.put("art", KEY, FILES)
    cache.clear()
    assert entry.read("a.txt") == b"alpha"
    assert entry.path("a.txt").read_bytes() == b"alpha"


def test_a_folder_deleted_meanwhile_is_made_again(cache: Cache, folder: Path) -> None:
    cache.put("art", KEY, FILES)
    shutil.rmtree(folder)
    assert cache.get("art", KEY) is None
    cache.put("art", KEY, FILES)
    assert reopened(folder).get("art", KEY) is not None


def test_signatures(cache: Cache, folder: Path, tmp_path: Path) -> None:
    tag = cache.sign(b"data")
    assert reopened(folder).verify(b"data", tag)
    assert not cache.verify(b"date", tag)
    assert not cache.verify(b"data", b"")
    assert not reopened(tmp_path / "other").verify(b"data", tag)


# Damage: one warning, removed, built again


def truncate(entry: Path) -> str:
    os.truncate(entry / "b.bin", 100)
    return "b.bin has 100 bytes instead of 256"


def change_a_byte(entry: Path) -> str:
    (entry / "a.txt").write_bytes(b"alphA")
    return "a.txt was changed"


def remove_a_file(entry: Path) -> str:
    (entry / "a.txt").unlink()
    return "a.txt is missing"


def remove_the_manifest(entry: Path) -> str:
    (entry / "manifest.json").unlink()
    return "it has no manifest"


def cut_the_manifest(entry: Path) -> str:
    os.truncate(entry / "manifest.json", 20)
    return "its manifest is damaged"


def empty_the_manifest(entry: Path) -> str:
    (entry / "manifest.json").write_bytes(b"[]")
    return "its manifest is damaged"


def forge_the_manifest(entry: Path) -> str:
    path = entry / "manifest.json"
    path.write_text(path.read_text().replace("a.txt", "c.txt"))
    return "its manifest was not written by this user"


def forge_the_signature(entry: Path) -> str:
    path = entry / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "hmac": "00" * 32}))
    return "its manifest was not written by this user"


def nest_the_manifest(entry: Path) -> str:
    (entry / "manifest.json").write_bytes(b"[" * 200_000)
    return "its manifest is damaged"


def put_half_characters_into_the_manifest(entry: Path) -> str:
    (entry / "manifest.json").write_text(json.dumps({"body": "\ud800", "hmac": "00"}))
    return "its manifest is damaged"


def blow_up_the_manifest(entry: Path) -> str:
    os.truncate(entry / "manifest.json", 64 << 30)
    return f"manifest.json has {64 << 30} bytes, more than {1 << 20}"


def blow_up_a_file(entry: Path) -> str:
    os.truncate(entry / "b.bin", 64 << 30)
    return f"b.bin has {64 << 30} bytes, more than 256"


def link_elsewhere(entry: Path) -> str:
    outside = entry / "outside"
    outside.write_bytes(b"alpha")
    (entry / "a.txt").unlink()
    (entry / "a.txt").symlink_to(outside)
    return f"a.txt cannot be read: {os.strerror(errno.ELOOP)}"


def put_a_folder(entry: Path) -> str:
    (entry / "a.txt").unlink()
    (entry / "a.txt").mkdir()
    return "a.txt is not a regular file"


def put_a_pipe(entry: Path) -> str:
    (entry / "a.txt").unlink()
    os.mkfifo(entry / "a.txt")
    return "a.txt is not a regular file"


def lose_the_secret(entry: Path) -> str:
    (entry.parents[2] / "user.key").unlink()
    return "its manifest was not written by this user"


def publish_the_secret(entry: Path) -> str:
    (entry.parents[2] / "user.key").chmod(0o644)
    return "its manifest was not written by this user"


def cut_the_secret(entry: Path) -> str:
    os.truncate(entry.parents[2] / "user.key", 4)
    return "its manifest was not written by this user"


DAMAGES = [
    truncate,
    change_a_byte,
    remove_a_file,
    remove_the_manifest,
    cut_the_manifest,
    empty_the_manifest,
    forge_the_manifest,
    forge_the_signature,
    nest_the_manifest,
    put_half_characters_into_the_manifest,
    blow_up_the_manifest,
    blow_up_a_file,
    link_elsewhere,
    put_a_folder,
    put_a_pipe,
    lose_the_secret,
    publish_the_secret,
    cut_the_secret,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_built_again(
    cache: Cache, folder: Path, damage: Callable[[Path], str]
) -> None:
    cache.put("art", KEY, FILES)
    reason = damage(entry_folder(folder))
    with pytest.warns(CacheWarning) as caught:
        entry = reopened(folder).get_or_build("art", KEY, lambda: {"new": b"new"})
    assert [str(warning.message) for warning in caught] == [
        f"cache entry '{entry_folder(folder)}' is not used and is built again: {reason}"
    ]
    assert not entry.hit and entry.read("new") == b"new"
    found = reopened(folder).get("art", KEY)
    assert found is not None and dict(found.files) == {"new": b"new"}


def test_an_entry_moved_to_another_key_is_not_used(cache: Cache, folder: Path) -> None:
    cache.put("art", KEY, FILES)
    other = key_of("other")
    entry_folder(folder, other).parent.mkdir(exist_ok=True)
    entry_folder(folder).rename(entry_folder(folder, other))
    with pytest.warns(CacheWarning, match="its manifest belongs to another entry"):
        assert cache.get("art", other) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_used(cache: Cache, folder: Path) -> None:
    cache.put("art", KEY, FILES)
    os.chown(entry_folder(folder) / "a.txt", NOBODY, NOBODY)
    with pytest.warns(CacheWarning, match="a.txt belongs to another user"):
        assert cache.get("art", KEY) is None


# Folders that cannot be trusted


def assert_refused(folder: Path, trouble: str) -> None:
    """Not used, one warning; what is compiled still works for this process."""
    cache = reopened(folder)
    before = sorted(folder.rglob("*")) if folder.is_dir() else None
    with pytest.warns(CacheWarning) as caught:
        assert cache.get("art", KEY) is None
        entry = cache.get_or_build("art", KEY, lambda: FILES)
        again = cache.get_or_build("art", KEY, lambda: pytest.fail("built twice"))
        tag = cache.sign(b"data")
    assert [str(warning.message) for warning in caught] == [
        f"cache folder '{folder}': {trouble}. What is compiled now is lost when the process ends. "
        "Point DICP_CACHE_DIR (option cache_dir) at a folder with space left that belongs to you "
        "and that nobody else can write."
    ]
    assert entry.path("a.txt").read_bytes() == b"alpha"
    assert again.hit and again.path("a.txt").read_bytes() == b"alpha"
    assert cache.verify(b"data", tag) and cache.info().trouble == trouble
    assert (sorted(folder.rglob("*")) if folder.is_dir() else None) == before


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_others_can_write_is_refused(cache: Cache, folder: Path, mode: int) -> None:
    cache.put("art", KEY, {"a.txt": b"planted"})
    folder.chmod(mode)
    assert_refused(folder, f"it is not used, because other users can write it (mode {mode:o})")


def test_a_folder_opened_to_others_while_in_use_is_refused(cache: Cache, folder: Path) -> None:
    cache.put("art", KEY, FILES)
    folder.chmod(0o777)
    with pytest.warns(CacheWarning, match="other users can write it"):
        assert cache.get("art", KEY) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_another_user_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    assert_refused(folder, f"it is not used, because it belongs to another user (uid {NOBODY})")


def test_a_file_in_place_of_the_folder(folder: Path) -> None:
    folder.write_text("")
    assert_refused(folder, "it is not used, because it is not a folder")


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "x" / "cache"
    assert_refused(folder, f"it cannot be used: {os.strerror(errno.ENOTDIR)}")


# Read-only and full disks


# Drops its privileges once everything is imported, as others may not read the interpreter's files;
# works from inside the parent folder, as others may not search the folders above.
READ_ONLY = """
import os, sys, warnings
from pathlib import Path
from dicp.cache import Cache
key, missing, user = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.setgroups([])
os.setgid(user)
os.setuid(user)
cache = Cache(Path("cache"), 2**30)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    hit = cache.get_or_build("art", key, dict)
    new = cache.get_or_build("art", missing, lambda: {"n": b"new"})
    newer = cache.get_or_build("art", missing + "0", lambda: {"n": b"newer"})
    again = cache.get_or_build("art", missing, dict)
assert hit.hit and hit.read("a.txt") == b"alpha", hit
assert not new.hit and new.path("n").read_bytes() == b"new"
assert newer.path("n").read_bytes() == b"newer"
assert again.hit and again.path("n") == new.path("n")
print(len(caught), caught[0].message)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's privileges")
def test_a_read_only_folder_still_gives_hits(cache: Cache, folder: Path) -> None:
    cache.put("art", KEY, FILES)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
        path.chmod(0o500 if path.is_dir() else 0o400)
    folder.parent.chmod(0o755)
    command = [sys.executable, "-c", READ_ONLY, KEY, key_of("missing"), str(NOBODY)]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"1 cache folder 'cache': it cannot be written: {os.strerror(errno.EACCES)}. "
    )


def test_a_full_disk_falls_back_to_a_private_folder(
    cache: Cache, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.put("art", KEY, FILES)
    write = store_module.write_new

    def full(parent: int, name: str, content: bytes) -> None:
        if Path(os.readlink(f"/proc/self/fd/{parent}")).is_relative_to(folder):
            fail_with(errno.ENOSPC)()
        write(parent, name, content)

    monkeypatch.setattr(store_module, "write_new", full)
    with pytest.warns(CacheWarning) as caught:
        for name in ("x", "y"):
            entry = cache.get_or_build("art", key_of(name), lambda: FILES)
            assert entry.path("a.txt").read_bytes() == b"alpha"
            assert not entry.path("a.txt").is_relative_to(folder)
            assert cache.get_or_build("art", key_of(name), lambda: pytest.fail("built twice")).hit
    assert len(caught) == 1
    assert f"it cannot be written: {os.strerror(errno.ENOSPC)}. " in str(caught[0].message)
    assert os.listdir(folder / "tmp") == [], "nothing half-written stays"
    found = cache.get("art", KEY)
    assert found is not None, "what was there is still used"


def test_no_disk_at_all_falls_back_to_memory(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "write_new", fail_with(errno.ENOSPC))
    with pytest.warns(CacheWarning):
        entry = cache.get_or_build("art", KEY, lambda: FILES)
    assert entry.path("b.bin").read_bytes() == FILES["b.bin"]
    found = cache.get("art", KEY)
    assert found is not None and found.hit and found.path("a.txt").read_bytes() == b"alpha"
    assert found.path("a.txt") == entry.path("a.txt"), "one memory file per content"
    cache.clear()
    assert cache.get("art", KEY) is None


def test_too_many_open_files_damage_nothing(cache: Cache, folder: Path) -> None:
    """An entry that cannot be opened for the moment stays, and so does the user's secret."""
    cache.put("art", KEY, FILES)
    secret = (folder / "user.key").read_bytes()
    held: list[int] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(6):
        small = reopened(folder)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            for descriptor in held[:spare]:
                os.close(descriptor)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                small.get("art", KEY)
            assert all("Too many open files" in str(each.message) for each in told)
            assert not any("built again" in str(each.message) for each in told)
        finally:
            for descriptor in held[spare:]:
                os.close(descriptor)
            held.clear()
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (folder / "user.key").read_bytes() == secret
        assert reopened(folder).get("art", KEY) is not None
    assert small.get("art", KEY) is not None, "with six descriptors to spare it is read"


def test_no_temporary_folder(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.Path, "mkdir", fail_with(errno.EROFS))
    monkeypatch.setattr(store_module.tempfile, "mkdtemp", fail_with(errno.EROFS))
    with pytest.warns(CacheWarning, match="it cannot be used: Read-only file system"):
        entry = cache.get_or_build("art", KEY, lambda: FILES)
    assert entry.path("a.txt").read_bytes() == b"alpha"


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOLCK, "no locks")])
def test_a_file_system_without_locks(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def no_lock(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(store_module.FileLock, "acquire", no_lock)
    assert not cache.get_or_build("art", KEY, lambda: FILES).hit
    assert cache.get("art", KEY) is not None


def test_a_file_system_without_hard_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.os, "link", fail_with(errno.EPERM))
    reopened(folder).put("art", KEY, FILES)
    assert reopened(folder).get("art", KEY) is not None


# Builds


def test_a_failing_build_keeps_nothing(cache: Cache) -> None:
    def build() -> dict[str, bytes]:
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="^no$"):
            cache.get_or_build("art", KEY, build)
    assert cache.get("art", KEY) is None
    assert not cache.get_or_build("art", KEY, lambda: FILES).hit


def test_builds_nest(cache: Cache) -> None:
    def outer() -> dict[str, bytes]:
        return {"o": cache.get_or_build("art", KEY, lambda: FILES).read("a.txt")}

    assert cache.get_or_build("graph", KEY, outer).read("o") == b"alpha"


def test_threads_build_once(cache: Cache) -> None:
    builds: list[int] = []
    entries: list[Entry] = []

    def build() -> dict[str, bytes]:
        builds.append(1)
        time.sleep(0.2)
        return FILES

    def run() -> None:
        entries.append(cache.get_or_build("art", KEY, build))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert sorted(entry.hit for entry in entries) == [False, True, True, True]


def _race(folder: Path, log: Path, start: Barrier) -> None:
    def build() -> dict[str, bytes]:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.5)
        return FILES

    warnings.simplefilter("error")
    cache = Cache.open(Config(cache_dir=folder))
    start.wait()
    entry = cache.get_or_build("art", KEY, build)
    assert entry.path("b.bin").read_bytes() == FILES["b.bin"]
    assert cache.verify(b"data", cache.sign(b"data"))


def test_two_processes_build_once_on_an_empty_cache(folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log, start = tmp_path / "log", context.Barrier(3, timeout=200)
    processes = [context.Process(target=_race, args=(folder, log, start)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "built\n"


KILLED = """
import os, sys, time
from pathlib import Path
from dicp.cache import Cache
def build():
    print("building", flush=True)
    time.sleep(60)
Cache(Path(sys.argv[1]), 2**30).get_or_build("art", sys.argv[2], build)
"""


def test_a_killed_builder_blocks_nobody(cache: Cache, folder: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(folder), KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"building\n"
        process.kill()
    started = time.monotonic()
    assert not cache.get_or_build("art", KEY, lambda: FILES).hit
    assert time.monotonic() - started < 5


def test_a_builder_that_hangs_is_not_waited_for_without_end(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.1)
    assert cache._store is not None
    cache.put("art", key_of("other"), FILES)
    with cache._store.lock("art", KEY):
        assert not cache.get_or_build("art", KEY, lambda: FILES).hit


def _write(folder: Path, seed: int, seconds: float) -> None:
    """One of several writers and readers of the same few entries; any warning is an error."""
    warnings.simplefilter("error")
    rng, cache = random.Random(seed), Cache(folder, 2**30)
    files = {"a.txt": b"alpha" * 100, "b.bin": bytes(5000)}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        key = key_of(rng.randrange(3))
        use = rng.choice([cache.put, lambda *a: cache.get_or_build(*a[:2], lambda: files)])
        assert dict(use("art", key, files).files) == files


def test_eight_writers_beside_one_that_clears(cache: Cache, folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(folder, k, 1.0)) for k in range(8)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        cache.clear()
        cache.gc(0)
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert not cache.trouble and os.listdir(folder / "tmp") == []


def test_kills_at_random_moments_leave_whole_entries(cache: Cache, folder: Path) -> None:
    """Whatever is found afterwards is whole, without a warning; the rest is swept in time."""
    context, rng = multiprocessing.get_context("fork"), random.Random(7)
    for seed in range(8):
        writer = context.Process(target=_write, args=(folder, seed, 60.0))
        writer.start()
        time.sleep(0.02 + rng.random() / 20)
        writer.kill()
        writer.join()
        for k in range(3):
            assert reopened(folder).get_or_build("art", key_of(k), lambda: FILES).files
    for left in (folder / "tmp").iterdir():
        os.utime(left, (1e9, 1e9))
    cache.gc()
    assert os.listdir(folder / "tmp") == [] and cache.info().entries == 3


LOCKED = """
import os, sys, warnings
from pathlib import Path
from dicp.cache import Cache, key_of
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
warnings.simplefilter("always")
cache = Cache(Path("cache"), 2**30)
for k in range(3):
    assert not cache.get_or_build("art", key_of(k), lambda: {"n": b"new"}).hit
    assert cache.get("art", key_of(k)).path("n").read_bytes() == b"new"
cache.gc(0), cache.info(), cache.clear()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's privileges")
@pytest.mark.parametrize("name", ["", "art", "tmp", "locks", "user.key", "CACHEDIR.TAG"])
def test_a_folder_without_permissions_costs_one_warning(
    cache: Cache, folder: Path, name: str
) -> None:
    cache.get_or_build("art", KEY, lambda: FILES)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    (folder / name).chmod(0)
    folder.parent.chmod(0o755)
    command = [sys.executable, "-c", LOCKED, str(NOBODY)]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Locks spare work and no more; a secret that cannot be read is replaced.
    assert done.stderr.count("CacheWarning:") == (name not in ("locks", "user.key"))


# Accounting and eviction


def fill(cache: Cache, folder: Path, names: str, size: int = 1000) -> None:
    """Entries of `size` bytes and more, used one minute after the other, an hour ago."""
    for index, name in enumerate(names):
        cache.put("art", key_of(name), {"x": bytes(size)})
        used = time.time() - 3600 + 60 * index
        os.utime(entry_folder(folder, key_of(name)) / "manifest.json", (used, used))


def present(folder: Path, names: str) -> str:
    return "".join(name for name in names if entry_folder(folder, key_of(name)).is_dir())


def test_info(cache: Cache, folder: Path) -> None:
    assert cache.info() == CacheInfo(folder, ())
    fill(cache, folder, "ab")
    cache.put("graph", KEY, FILES)
    info = reopened(folder).info()
    assert [(kind.kind, kind.entries) for kind in info.kinds] == [("art", 2), ("graph", 1)]
    files = [path for path in folder.rglob("*") if path.is_file() and KEY in path.parts]
    assert info.kinds[1] == KindInfo("graph", 1, sum(path.stat().st_size for path in files))
    assert info.entries == 3 and info.bytes == sum(kind.bytes for kind in info.kinds) > 2000


def test_clear(cache: Cache, folder: Path) -> None:
    fill(cache, folder, "ab")
    held, tag = cache.info(), cache.sign(b"data")
    assert cache.clear() == held
    assert cache.info().entries == 0 and cache.get("art", key_of("a")) is None
    assert cache.verify(b"data", tag)


def test_gc_removes_the_least_recently_used(cache: Cache, folder: Path) -> None:
    fill(cache, folder, "abcd")
    assert cache.get("art", key_of("a")) is not None
    one = cache.info().bytes // 4
    assert cache.gc(2 * one + 10).entries == 2
    assert present(folder, "abcd") == "ad"
    assert cache.gc(2 * one + 10).entries == 0
    assert cache.gc(0).entries == 2 and cache.info().entries == 0


def test_gc_uses_the_configured_size(cache: Cache, folder: Path) -> None:
    fill(cache, folder, "abcd")
    assert reopened(folder, max_bytes=3000).gc().entries == 2


def test_the_first_put_of_a_process_collects_once(cache: Cache, folder: Path) -> None:
    fill(cache, folder, "abc")
    small = reopened(folder, max_bytes=3000)
    small.put("art", key_of("d"), {"x": bytes(1000)})
    assert present(folder, "abcd") == "cd"
    fill(small, folder, "ab")
    assert present(folder, "abcd") == "abcd"


def test_what_was_just_used_is_not_collected_by_a_put(cache: Cache, folder: Path) -> None:
    fill(cache, folder, "ab")
    assert cache.get("art", key_of("a")) is not None
    reopened(folder, max_bytes=1).put("art", key_of("c"), {"x": b""})
    assert present(folder, "abc") == "ac"


def test_entries_of_a_clock_that_ran_ahead_are_collected(cache: Cache, folder: Path) -> None:
    fill(cache, folder, "abc")
    (folder / "tmp" / ("0" * 32)).mkdir()
    in_220_years = time.time() + 7e9
    for path in folder.rglob("*"):
        os.utime(path, (in_220_years, in_220_years))
    reopened(folder, max_bytes=1).put("art", key_of("d"), {"x": b""})
    assert present(folder, "abcd") == "d" and not os.listdir(folder / "tmp")


def test_gc_gives_way_to_another_one(cache: Cache, folder: Path) -> None:
    fill(cache, folder, "ab")
    assert cache._store is not None
    with cache._store.lock("gc"):
        assert cache.gc(0).entries == 0
    assert cache.gc(0).entries == 2


def test_gc_sweeps_what_was_abandoned(cache: Cache, folder: Path) -> None:
    cache.get_or_build("art", KEY, lambda: FILES)
    old, new = "0" * 32, "1" * 32
    (folder / "tmp" / old).mkdir()
    (folder / "tmp" / new).mkdir()
    long_ago = time.time() - 100_000
    for path in (folder / "tmp" / old, folder / "locks" / "art" / KEY):
        os.utime(path, (long_ago, long_ago))
    cache.gc()
    assert os.listdir(folder / "tmp") == [new]
    assert not (folder / "locks" / "art" / KEY).exists()
    assert cache.get("art", KEY) is not None


# The folder that the user names may hold other files


def tree(folder: Path) -> dict[str, bytes | None]:
    """Every path below `folder`, with the content of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def with_files_of_the_users(folder: Path) -> Path:
    """What looks like the cache's own folders, from long ago."""
    names = ("tmp/draft", f"tmp/{'0' * 32}", "locks/art/me", f"locks/art/{KEY}", "work/ab/abc/text",
             "photos/me/and/you", f"art/{KEY[:2]}/{KEY}/diary", "user.key")  # fmt: skip
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        for place in (path, path.parent):
            os.utime(place, (1e9, 1e9))
    return folder


def use_everything(cache: Cache) -> None:
    """Entries, replaced, damaged, evicted, cleared: all that removes files."""
    for name in "ab":
        for _ in range(2):
            cache.put("art", key_of(name), FILES)
    (cache.folder / "art" / key_of("a")[:2] / key_of("a") / "a.txt").write_bytes(b"")
    with pytest.warns(CacheWarning):
        cache.get_or_build("art", key_of("a"), lambda: FILES)
    assert cache.gc(0).entries == 3
    cache.put("art", KEY, FILES)
    assert cache.clear().entries == 1
    assert cache.clear().entries == 0


def test_files_of_the_users_beside_the_cache_stay(tmp_path: Path) -> None:
    """An older cache among them: it is left alone, and one warning says so."""
    users = with_files_of_the_users(tmp_path / "users")
    before = tree(users)
    cache = Cache.open(Config(cache_dir=users))
    with pytest.warns(CacheWarning, match="holds the cache of an older dicp. It is not used any"):
        cache.put("art", KEY, FILES)
    use_everything(cache)
    after = tree(users)
    assert {name: after.get(name) for name in before} == before
    assert {Path(name).parts[0] for name in after.keys() - before.keys()} == {"dicp-cache-v2"}


def test_files_of_the_users_in_the_cache_stay(cache: Cache, folder: Path) -> None:
    """Inside, only what has the form of an entry is removed."""
    cache.put("art", KEY, FILES)
    cache.clear()
    names = (
        "tmp/draft", f"locks/art/{'x' * 64}", "work/ab/abc/text", f"art/{KEY[:2]}/notes/a",
        f"art/{KEY[:2]}/{KEY}/inner/diary", f"tmp/{'0' * 32}/inner/diary", "letter",
        f"tmp/{'1' * 32}", f"locks/art/{key_of('text')}", f"locks/art/{key_of('folder')}/photo",
    )  # fmt: skip
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        os.utime(path, (1e9, 1e9))
    for path in (folder / "tmp" / ("0" * 32), folder / "locks" / "art" / key_of("folder")):
        os.utime(path, (1e9, 1e9))
    use_all = reopened(folder)
    for name in "ab":
        use_all.put("art", key_of(name), FILES)
    assert use_all.gc(0).entries == 2 and use_all.clear().entries == 0
    with pytest.warns(CacheWarning):  # the place of this entry is taken
        assert use_all.get_or_build("art", KEY, lambda: FILES).read("a.txt") == b"alpha"
    assert all((folder / name).read_text() == name for name in names)


@pytest.mark.parametrize("name", ["", "tmp", "art", "locks", "locks/art", "art/{0}", "art/{0}/{1}"])
def test_links_are_never_followed(cache: Cache, folder: Path, tmp_path: Path, name: str) -> None:
    """Neither that of the folder itself, nor one inside."""
    cache.get_or_build("art", KEY, lambda: FILES)
    users = with_files_of_the_users(tmp_path / "users")
    shutil.copytree(folder, users / "old", dirs_exist_ok=True)
    before = tree(users)
    link = folder / name.format(KEY[:2], KEY)
    shutil.rmtree(link)
    link.symlink_to(users / "old" if not name else users)
    used = reopened(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for key in (KEY, key_of("other")):
            assert used.get_or_build("art", key, lambda: FILES).read("a.txt") == b"alpha"
            used.put("art", key, FILES)
        used.gc(0)
        used.clear()
    assert tree(users) == before
    assert len(caught) <= 2, [str(w.message) for w in caught]


def test_a_folder_without_the_mark_is_refused(folder: Path) -> None:
    with_files_of_the_users(folder)
    folder.chmod(0o700)
    assert_refused(folder, "it is not used, because it holds files and no mark of dicp's")


@pytest.mark.parametrize(
    "mark", [b"", b"Signature: 8a477f597d28d172789f06886806bc55\n", b"x" * 999]
)
def test_the_mark_of_another_format_is_refused(cache: Cache, folder: Path, mark: bytes) -> None:
    cache.put("art", KEY, FILES)
    (folder / "CACHEDIR.TAG").write_bytes(mark)
    trouble = "it is not used, because CACHEDIR.TAG in it is not that of this format"
    assert_refused(folder, f"{trouble} (delete the folder if it is a cache of dicp's)")


def test_a_mark_that_was_never_finished(cache: Cache, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / f"CACHEDIR.TAG.{'0' * 32}").write_bytes(b"Sig")
    cache.put("art", KEY, FILES)
    assert reopened(folder).get("art", KEY) is not None


def open_to_all(parent: Path) -> str:
    parent.parent.chmod(0o777)
    return f"other users can write '{parent.parent}' (mode 777)"


def open_to_the_group(parent: Path) -> str:
    parent.chmod(0o775)
    return f"other users can write '{parent}' (mode 775)"


def anothers(parent: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can give folders away")
    os.chown(parent, NOBODY, NOBODY)
    return f"'{parent}' belongs to another user (uid {NOBODY})"


def behind_anothers_link(parent: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can give links away")
    parent.rename(parent.with_name("real"))
    parent.symlink_to(parent.with_name("real"))
    os.chown(parent, NOBODY, NOBODY, follow_symlinks=False)
    return f"'{parent}' belongs to another user (uid {NOBODY})"


@pytest.mark.parametrize("spoil", [open_to_all, open_to_the_group, anothers, behind_anothers_link])
def test_parents_that_others_can_write_are_refused(
    tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    folder = tmp_path / "outer" / "parent" / "cache"
    reopened(folder).put("art", KEY, FILES)
    reason = spoil(folder.parent)
    assert_refused(folder, f"it is not used, because {reason}")


@pytest.mark.parametrize("form", ["behind a link of our own", "in a sticky folder"])
def test_parents_that_are_fine(tmp_path: Path, form: str) -> None:
    parent = tmp_path / "parent"
    parent.mkdir(mode=0o755)
    if form == "in a sticky folder":
        parent.chmod(0o1777)
    else:
        (tmp_path / "link").symlink_to(parent)
        parent = tmp_path / "link"
    reopened(parent / "cache").put("art", KEY, FILES)
    assert reopened(parent / "cache").get("art", KEY) is not None


def test_clear_of_some_kinds_leaves_the_others(tmp_path: Path) -> None:
    kept, key = Cache(tmp_path / "cache", 2**20), key_of("any")
    for kind in ("unit", "graph", "aot"):
        kept.put(kind, key, {"text": b"x"})
    assert [row.kind for row in kept.clear("graph", "aot").kinds] == ["aot", "graph"]
    assert kept.get("unit", key) and not kept.get("graph", key)
