"""Why apt-get failed: what apt and dpkg print, beside what test_bare_bootstrap.py brings about."""

# ruff: noqa: E501  (as apt prints them)

from __future__ import annotations

import pytest

from deploy import apt

DOWN = """\
W: Failed to fetch http://deb.debian.org/debian/dists/bookworm/InRelease  Temporary failure resolving 'deb.debian.org'
W: Some index files failed to download. They have been ignored, or old ones used instead.
"""


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ("E: Could not get lock /var/lib/apt/lists/lock. It is held by process 812 (unattended-upgr)\nE: Unable to lock directory /var/lib/apt/lists/",
         "process 812 (unattended-upgr) holds /var/lib/apt/lists/lock: another program installs packages there; wait until it has ended, and bootstrap again"),
        ("E: Could not get lock /var/lib/dpkg/lock-frontend - open (11: Resource temporarily unavailable)\nE: Unable to acquire the dpkg frontend lock (/var/lib/dpkg/lock-frontend), is another process using it?",
         "another program holds /var/lib/dpkg/lock-frontend: another program installs packages there; wait until it has ended, and bootstrap again"),
        ("E: You don't have enough free space in /var/cache/apt/archives/.",
         "there is no space left in /var/cache/apt/archives/ for the packages; free some (apt-get clean, docker system df, journalctl --vacuum-size=200M), and bootstrap again"),
        ("The following packages have unmet dependencies:\nE: Unmet dependencies. Try 'apt --fix-broken install' with no packages (or specify a solution).",
         "packages that are there lack what they depend on; run apt-get --fix-broken install there as root, and bootstrap again"),
        ("E: Conflicting values set for option Signed-By regarding source https://download.docker.com/linux/debian/ bookworm: /etc/apt/keyrings/docker.asc != /etc/apt/keyrings/docker.gpg\nE: The list of sources could not be read.",
         "two files in /etc/apt name https://download.docker.com/linux/debian/ with different Signed-By; remove one of them, and bootstrap again"),
        ("E: Release file for http://deb.debian.org/debian/dists/bookworm-updates/InRelease is expired (invalid since 3d 2h 1min 5s). Updates for this repository will not be applied.",
         "http://deb.debian.org/debian/dists/bookworm-updates/InRelease has been out of date for 3d 2h 1min 5s: correct the clock there or the mirror, and bootstrap again"),
        ("E: Unable to locate package tini",
         "no package tini in what /etc/apt/sources.list and sources.list.d name; add a source that has it (Ubuntu: universe), and bootstrap again"),
        ("E: The repository 'http://ppa.example/x bookworm Release' does not have a Release file.",
         "http://ppa.example/x has nothing for bookworm; correct or remove that source in /etc/apt, and bootstrap again"),
        ("E: something new", ""),
    ],
)  # fmt: skip
def test_each_failure_is_one_sentence_with_its_remedy(errors: str, said: str) -> None:
    assert apt.explain("", errors) == said


def test_a_package_that_is_missing_since_the_lists_could_not_be_fetched_is_not_the_reason() -> None:
    said = apt.explain("", "E: Unable to locate package tini", DOWN)
    assert said.startswith(
        "http://deb.debian.org/debian/dists/bookworm/InRelease cannot be fetched (Temporary"
    )


def test_of_what_is_not_known_dpkgs_complaint_comes_first() -> None:
    errors = "E: Sub-process /usr/bin/dpkg returned an error code (1)\n"
    out = "Unpacking x\ndpkg: error processing archive x.deb (--unpack):\n trying to overwrite '/a'\nProcessing\n"
    assert apt.last_words(out, errors) == (
        "dpkg: error processing archive x.deb (--unpack): trying to overwrite '/a'"
    )
    assert apt.last_words("", "W: a\nE: first\nE: last\n") == "first"
    assert apt.last_words("", "") == ""
