"""apt-get as `fab bootstrap` uses it: commands that change what they are told to, and why one failed."""

from __future__ import annotations

import re

# Words that we can read, no questions, and no restart of what runs (needrestart, on Ubuntu).
_ENVIRONMENT = ("LC_ALL=C", "DEBIAN_FRONTEND=noninteractive", "NEEDRESTART_SUSPEND=1")
APT = ("env", *_ENVIRONMENT, "apt-get")
UPDATE = (*APT, "update")
# What is there is neither upgraded nor removed, and a file that somebody has changed stays as it is.
INSTALL = (
    *APT,
    *("-o", "Dpkg::Options::=--force-confold"),
    *("install", "-y", "--no-install-recommends", "--no-upgrade", "--no-remove"),
)
DOWNLOAD = ("/usr/lib/apt/apt-helper", "download-file")  # over apt's own proxies; no curl needed
_HELD = re.compile(r"Could not get lock (\S+?)\.? It is held by process (\d+) \(([^)]*)\)")
_LOCKED = re.compile(
    r"Could not get lock (\S+)|Unable to (?:acquire the dpkg frontend|lock directory) ?\(?(\S+?)\)?[,\s]"
)
AGAIN = "and bootstrap again"


def update_only(sources: str) -> tuple[str, ...]:
    """Fetch the lists of one file of sources. A plain update would only warn if it cannot."""
    return (
        *APT,
        *("-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=-"),
        *("-o", "APT::Get::List-Cleanup=0", "-o", "APT::Update::Error-Mode=any"),
        "update",
    )


def holder(errors: str) -> str:
    """Who holds a lock that was wanted: ``process 812 (unattended-upgr) holds /var/…``; or nothing."""
    held = _HELD.search(errors)
    if held:
        return f"process {held[2]} ({held[3]}) holds {held[1]}"
    locked = _LOCKED.search(errors)
    return f"another program holds {locked[1] or locked[2]}" if locked else ""


def explain(out: str, errors: str, earlier: str = "") -> str:
    """What went wrong in an apt-get or apt-helper, with the remedy; empty for what is not known.

    `earlier` is what updates before it had complained of, which apt itself does not count as failures.
    """
    held = holder(errors)
    if held:
        return f"{held}: another program installs packages there; wait until it has ended, {AGAIN}"
    said = f"{errors}\n{out}"  # dpkg has a terminal of apt's: what it complains of is among apt's output
    return (
        _full(said)
        or _unfinished(errors)
        or _in_the_way(out, errors)
        or _release(errors)
        or _unknown_package(errors, earlier)
        or _script(said)
    )


def _full(said: str) -> str:
    found = re.search(r"No space left on device|don't have enough free space in (\S+?)\.?$", said, re.M)
    if not found:
        return ""
    return (
        f"there is no space left{f' in {found[1]}' if found[1] else ''} for the packages; free some (apt-get "
        f"clean, docker system df, journalctl --vacuum-size=200M), {AGAIN}"
    )


def _unfinished(errors: str) -> str:
    if "dpkg was interrupted" in errors:
        return f"an earlier installation was interrupted; run dpkg --configure -a there as root, {AGAIN}"
    if re.search(r"Unmet dependencies\. Try|fix-broken install'", errors):
        return (
            "packages that are there lack what they depend on; run apt-get --fix-broken install there as "
            f"root, {AGAIN}"
        )
    return ""


def _in_the_way(out: str, errors: str) -> str:
    if "Packages need to be removed but remove is disabled" in errors:
        gone = re.search(r"^The following packages will be REMOVED:\n((?: .*\n?)+)", out, re.M)
        names = " ".join(gone[1].split()) if gone else "packages that are there"
        return (
            f"it would remove {names}, which cannot be beside what is missing; if nothing there needs that, "
            f"apt-get remove {names}, {AGAIN}"
        )
    twice = re.search(r"Conflicting values set for option (\S+) regarding source (\S+)", errors)
    if twice:
        return f"two files in /etc/apt name {twice[2]} with different {twice[1]}; remove one of them, {AGAIN}"
    return ""


def _unknown_package(errors: str, earlier: str) -> str:
    found = re.search(
        r"Unable to locate package (\S+)|Package '?(\S+?)'? has no installation candidate", errors
    )
    if not found:
        return ""
    return _release(earlier) or (
        f"no package {found[1] or found[2]} in what /etc/apt/sources.list and sources.list.d name; add a "
        f"source that has it (Ubuntu: universe), {AGAIN}"
    )


def _script(said: str) -> str:
    found = re.search(r"installed (\S+) package (\S+) script subprocess (?:returned|was killed)", said)
    if not found:
        return ""
    return (
        f"the package {found[1]} is there, but its own {found[2]} script failed; dpkg --configure {found[1]} "
        f"there shows why: mend that, {AGAIN}"
    )


def _release(errors: str) -> str:
    """A repository that cannot be used."""
    early = re.search(r"Release file for (\S+) is not valid yet \(invalid for another ([^)]*)\)", errors)
    if early:
        return (
            f"{early[1]} is signed {early[2]} in the future: the clock there is behind; set it "
            f"(timedatectl set-ntp true), {AGAIN}"
        )
    late = re.search(r"Release file for (\S+) is expired \(invalid since ([^)]*)\)", errors)
    if late:
        return f"{late[1]} has been out of date for {late[2]}: correct the clock there or the mirror, {AGAIN}"
    signed = re.search(r"GPG error: (\S+) .*?: (.*)$", errors, re.M)
    if signed:
        return (
            f"{signed[1]} is not signed by the key that is expected ({signed[2].strip()}); if it is a mirror "
            f"or goes through a proxy, put that right, {AGAIN}"
        )
    absent = re.search(r"The repository '(\S+) (\S+) \S+' does not have a Release file", errors)
    failed = re.findall(r"Failed to fetch (\S+)  (.*)$", errors, re.M)
    if absent and (not failed or any("404" in why for _, why in failed)):
        remedy = "correct or remove that source in /etc/apt"
        if "download.docker.com" in absent[1]:
            remedy = "install Engine and Compose as https://docs.docker.com/engine/install says"
        return f"{absent[1]} has nothing for {absent[2]}; {remedy}, {AGAIN}"
    if failed:
        url, why = failed[0]
        return (
            f"{url} cannot be fetched ({_reason(why)}); look whether that machine reaches it (a proxy is set "
            f"by Acquire::https::Proxy in /etc/apt/apt.conf.d), {AGAIN}"
        )
    return ""


def _reason(why: str) -> str:
    return re.sub(r"\s+", " ", why).strip().rstrip(".")


def last_words(out: str, errors: str) -> str:
    """dpkg's complaint, if it has one, else apt's first; its last only says that something failed."""
    dpkg = re.findall(r"^dpkg: (?:error|unrecoverable fatal error)[^\n]*(?:\n .*)?", out, re.M)
    told = re.findall(r"^E: (.*)$", errors, re.M)
    lines = [line for line in errors.splitlines() if line.strip()]
    return re.sub(r"\s+", " ", (dpkg[-1:] or told[:1] or lines[-1:] or [""])[0]).strip()
