"""One function for each data set, and a tuple that names its columns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_jala.datasets.tables import number_levels, read_table


class Sleepstudy(NamedTuple):
    """Reaction times of 18 people on ten days of little sleep (Belenky et al. 2003).

    subject
        The person, 0 to 17.
    days
        Days of restricted sleep, 0 to 9.
    reaction
        Average reaction time in milliseconds.
    subjects
        Each person's number in the study.
    """

    subject: np.ndarray  # (180,)
    days: np.ndarray  # (180,)
    reaction: np.ndarray  # (180,)
    subjects: np.ndarray  # (18,)


def load_sleepstudy() -> Sleepstudy:
    """Load the sleep study, to ask whether lack of sleep slows everybody down alike.

    >>> data = load_sleepstudy()
    >>> data.reaction[:3]
    array([249.56  , 258.7047, 250.8006])
    """
    table = read_table("sleepstudy")
    subject, subjects = number_levels(table["Subject"])
    return Sleepstudy(subject, table["Days"], table["Reaction"], subjects.astype(int))


class Dyestuff(NamedTuple):
    """Yields of dyestuff from six batches, five preparations each.

    batch
        The batch, 0 to 5.
    amount
        Yield in grams of standard colour; of the simulated data, without a unit.
    """

    batch: np.ndarray  # (30,)
    amount: np.ndarray  # (30,)


def load_dyestuff() -> Dyestuff:
    """Load the yields of dyestuff (Davies and Goldsmith 1972), which vary by batch."""
    return _dyestuff("dyestuff")


def load_dyestuff2() -> Dyestuff:
    """Load yields that Box and Tiao (1973) simulated: the estimated variance is zero."""
    return _dyestuff("dyestuff2")


def _dyestuff(name: str) -> Dyestuff:
    table = read_table(name)
    return Dyestuff(number_levels(table["Batch"])[0], table["Yield"])


class Penicillin(NamedTuple):
    """Six samples of penicillin, each tested on each of 24 plates: crossed factors.

    plate, sample
        The plate, 0 to 23, and the sample, 0 to 5.
    diameter
        Of the zone in which bacteria do not grow, in millimetres.
    """

    plate: np.ndarray  # (144,)
    sample: np.ndarray  # (144,)
    diameter: np.ndarray  # (144,)


def load_penicillin() -> Penicillin:
    """Load the tests of penicillin (Davies and Goldsmith 1972)."""
    table = read_table("penicillin")
    plate, sample = (number_levels(table[name])[0] for name in ("plate", "sample"))
    return Penicillin(plate, sample, table["diameter"])


class Pastes(NamedTuple):
    """Strength of a chemical paste: ten batches, three casks each, two tests each.

    batch
        The batch, 0 to 9.
    cask
        The cask, 0 to 29: casks are nested in batches.
    strength
        Of the paste.
    """

    batch: np.ndarray  # (60,)
    cask: np.ndarray  # (60,)
    strength: np.ndarray  # (60,)


def load_pastes() -> Pastes:
    """Load the strengths of paste (Davies and Goldsmith 1972)."""
    table = read_table("pastes")
    batch, cask = (number_levels(table[name])[0] for name in ("batch", "sample"))
    return Pastes(batch, cask, table["strength"])


class Cbpp(NamedTuple):
    """Contagious bovine pleuropneumonia in 15 herds of zebu (Lesnoff et al. 2004).

    herd
        The herd, 0 to 14.
    period
        The period, 0 to 3.
    incidence
        New cases.
    size
        Animals in the herd at the beginning of the period.
    """

    herd: np.ndarray  # (56,)
    period: np.ndarray  # (56,)
    incidence: np.ndarray  # (56,)
    size: np.ndarray  # (56,)


def load_cbpp() -> Cbpp:
    """Load the cases of pleuropneumonia, counts out of a herd."""
    table = read_table("cbpp")
    period = table["period"].astype(int) - 1
    herd, _ = number_levels(table["herd"])
    return Cbpp(herd, period, table["incidence"].astype(int), table["size"].astype(int))


class Epil(NamedTuple):
    """Seizures of 59 people with epilepsy in four periods of two weeks (Thall, Vail 1990).

    subject
        The person, 0 to 58.
    period
        The period, 0 to 3.
    seizures
        How many there were.
    treated
        1 for progabide, 0 for placebo.
    base
        Seizures in the eight weeks before.
    age
        In years.
    """

    subject: np.ndarray  # (236,)
    period: np.ndarray  # (236,)
    seizures: np.ndarray  # (236,)
    treated: np.ndarray  # (236,)
    base: np.ndarray  # (236,)
    age: np.ndarray  # (236,)


def load_epil() -> Epil:
    """Load the counts of seizures, to ask whether the drug helps."""
    table = read_table("epil")
    return Epil(
        subject=number_levels(table["subject"])[0],
        period=table["period"].astype(int) - 1,
        seizures=table["y"].astype(int),
        treated=(table["trt"] == "progabide").astype(float),
        base=table["base"],
        age=table["age"],
    )


class Bacteria(NamedTuple):
    """Tests of 50 children for *H. influenzae* (Menzies; in Venables and Ripley 2002).

    child
        The child, 0 to 49.
    week
        Of the test: 0, 2, 4, 6 or 11.
    drug, drug_plus
        1 for children on the drug, and on the drug with encouragement to take it; children
        on the placebo have 0 in both.
    present
        1 if there were bacteria.
    children
        Their names in the study.
    """

    child: np.ndarray  # (220,)
    week: np.ndarray  # (220,)
    drug: np.ndarray  # (220,)
    drug_plus: np.ndarray  # (220,)
    present: np.ndarray  # (220,)
    children: np.ndarray  # (50,)


def load_bacteria() -> Bacteria:
    """Load the tests for bacteria, yes or no, up to five for each child."""
    table = read_table("bacteria")
    child, children = number_levels(table["ID"])
    return Bacteria(
        child=child,
        week=table["week"],
        drug=(table["trt"] == "drug").astype(float),
        drug_plus=(table["trt"] == "drug+").astype(float),
        present=table["yy"].astype(int),
        children=children,
    )


class Guimmun(NamedTuple):
    """Immunisation of 2,159 children in Guatemala (Pebley, Goldman and Rodríguez 1996).

    Children of 1,595 mothers in 161 communities, who have had at least one immunisation.

    mother
        The mother, 0 to 1594: mothers are nested in communities.
    community
        The community, 0 to 160.
    immunised
        1 if the child has had all immunisations.
    aged_two
        1 for children of two years or more, who could profit from a campaign.
    rural
        1 for a rural community.
    indigenous
        Share of the community that was indigenous in 1981.
    """

    mother: np.ndarray  # (2159,)
    community: np.ndarray  # (2159,)
    immunised: np.ndarray  # (2159,)
    aged_two: np.ndarray  # (2159,)
    rural: np.ndarray  # (2159,)
    indigenous: np.ndarray  # (2159,)


def load_guimmun() -> Guimmun:
    """Load the immunisations: two levels of groups, most of the lower of one child.

    ``read_table("guimmun")`` has further columns, of mothers and their husbands.
    """
    table = read_table("guimmun")
    return Guimmun(
        mother=number_levels(table["mom"])[0],
        community=number_levels(table["comm"])[0],
        immunised=(table["immun"] == "Y").astype(int),
        aged_two=(table["kid2p"] == "Y").astype(float),
        rural=(table["rural"] == "Y").astype(float),
        indigenous=table["pcInd81"],
    )


class Nile(NamedTuple):
    """Yearly flow of the Nile at Aswan (Durbin and Koopman 2001).

    year
        1871 to 1970.
    flow
        In units of 100 million cubic metres.
    """

    year: np.ndarray  # (100,)
    flow: np.ndarray  # (100,)


def load_nile() -> Nile:
    """Load the flow of the Nile, a time series whose level falls around 1899."""
    table = read_table("nile")
    return Nile(table["year"].astype(int), table["flow"])


class Digits(NamedTuple):
    """Small black and white pictures of hand-written digits, made from MNIST.

    pixels
        1 for ink, rows of the picture one after the other.
    digit
        2 or 4.
    """

    pixels: np.ndarray  # (60, 49)
    digit: np.ndarray  # (60,)


def load_digits() -> Digits:
    """Load thirty twos and thirty fours of 7 by 7 pixels.

    The first of their kind in MNIST's training set. A pixel stands for 4 by 4 of MNIST's,
    and is 1 where their mean is above 0.4.
    """
    table = read_table("digits")
    pixels = np.array([[mark == "#" for mark in row] for row in table["pixels"]], float)
    return Digits(pixels, table["digit"].astype(int))
