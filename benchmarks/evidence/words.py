"""What docs/results.md says around its tables: titles, claims, and the sentences that are written by hand."""

from __future__ import annotations

from benchmarks.evidence.groups import Claim

HEAD = """# Results

Made by `python -m benchmarks.evidence.document` from `benchmarks/results/evidence_*.csv`, which
`python -m benchmarks.evidence SUITE --data DIR` appends to, one row a run with its seed, commit, hardware, versions and
the call of the queue that ran it. Rows are never edited.

Tiny-ImageNet-100 (the first 100 classes, 50,000 training and 5,000 validation images of 64 px), trained from scratch
for 30 epochs at 96 px by the recipe `tiny_imagenet`, which averages no weights (so `ema_top1` is empty). Learning rate
and weight decay were chosen on MobileNetV2 alone. Absolute accuracies have nothing to do with ImageNet's: what can be
compared is what stands in one table.

**How to read it.** Top-1 in percent, mean ± standard error over n runs. A difference counts where it exceeds two
standard errors of itself; with fewer than three runs of one side nothing is said. A claim with a number holds where
the mean difference reaches it and counts. There are about twenty claims: one of them may hold by chance.

- **LightNL** is the paper's block, **by energy** the same divided by the energy of what it attends to
  (`lightnl_energy`, which the search uses now); the **control** is its depthwise kernel and BN without the affinity.
- **Random** networks are drawn from the search space, within 1 % below the budget. **Found** ones are what a search
  ended with, trained anew. By the **gates alone** the search takes what its super-network valued. With **trials** it
  then trains twenty candidates for a few epochs and takes the best on held-out training images, "selection images".
- **eq3** to **eq9**, **levi**, **zhu** and **wang** are the rows of the paper's Table 2; **050** is a width of 0.5.

**What validation images were used for.** No training, search or trial is steered by one, and what is reported is the
last epoch, not the best. But we looked at results before we chose how to go on. The search is the third form of
it: those before, "found" and "found with trials", were not shown to be better than random networks. That trials take
12 epochs at 64 px was chosen by validation top-1 of nine networks, five of them of the row "random". That the search
uses LightNL by energy was chosen after AutoNL-L's rows.

(Rows with the commit "23ebf" were made by a6d2072, those with "dff2cec" by b104c0a: the number was passed wrongly; a
"+" means changes that were not committed. The searches of the rows "found", "found without LightNL" and "found with
trials" landed by annealing, which missed much of what the gates valued; since 2b2ca59 it is dynamic programming.)
"""

TITLES = {
    "gain": "Does LightNL help, and is it the affinity?",
    "search": "Does the search find better networks, at the MACs of MobileNetV2 1.0?",
    "segmentation": "Segmentation: VOC 2012, DeepLabv3",
    "table2": "The operators of the paper's Table 2",
    "widths": "Widths and very small settings",
    "budget": "At 60 % of the MACs",
    "ablation": "What the parts of the search bring (one run each, without trials)",
    "kernels": "Do LightNL's kernels change where a training of 10 epochs ends?",
    "tuning": "How the recipe was chosen",
}

TRIALS = "found with trials at 64 px"
UNSEEN = "random, seeds 5 to 14"  # of which nothing was known when the trials were settled
CLAIMS = (
    Claim("gain", "LightNL improves MobileNetV2 by 1.6 points, as on ImageNet", "+ LightNL", "MobileNetV2", 1.6),
    Claim("gain", "LightNL is at least 1.0 better than its branch without affinity", "+ LightNL", "+ control", 1.0),
    Claim("gain", "LightNL brings more than SE does", "+ LightNL", "+ SE"),
    Claim("gain", "Divided by its energy, LightNL improves further", "+ LightNL by energy", "+ LightNL"),
    Claim("search", "The gates alone, without trials, beat networks drawn at random", "found", "random"),
    Claim(
        "search",
        "The gates alone are at least 1.5 better than MobileNetV2-LightNL",
        *("found", "MobileNetV2-LightNL", 1.5),
    ),
    Claim(
        "search", "With 20 trials of 6 epochs the search beats networks drawn at random", "found with trials", "random"
    ),
    Claim("search", "With 20 trials of 12 epochs at 64 px the search beats networks drawn at random", TRIALS, "random"),
    Claim(
        "search",
        "So it does the ten of which nothing was known when these trials were settled (asked afterwards)",
        *(TRIALS, UNSEEN),
    ),
    Claim(
        "search",
        "With these trials the search is at least 1.5 better than MobileNetV2-LightNL",
        *(TRIALS, "MobileNetV2-LightNL", 1.5),
    ),
    Claim("search", "LightNL in the space makes the search better", TRIALS, f"{TRIALS}, without LightNL"),
    *(
        Claim("search", f"The same {how}", f"{TRIALS}, {what}", f"{TRIALS}, without LightNL, {what}")
        for how, what in (("trained for 60 epochs", "60 epochs"), ("trained at 128 px", "at 128 px"))
    ),
    Claim(
        "search",
        "LightNL of all channels serves the found networks better",
        *(f"{TRIALS}, LightNL of all channels", TRIALS),
    ),
    Claim(
        "search",
        "LightNL by energy in the space makes the search better",
        *(f"{TRIALS}, LightNL by energy", f"{TRIALS}, without LightNL"),
    ),
    Claim("search", "The networks need the LightNL they were found with", TRIALS, f"{TRIALS}, then LightNL taken out"),
    Claim("search", "LightNL by energy in its place serves them better", f"{TRIALS}, then LightNL by energy", TRIALS),
    Claim("search", "LightNL by energy serves AutoNL-S better", "AutoNL-S by energy", "AutoNL-S"),
    Claim("search", "LightNL by energy serves AutoNL-L better", "AutoNL-L by energy", "AutoNL-L"),
    Claim("budget", "At 60 % of the MACs the search beats random networks too", "found", "random"),
    Claim("segmentation", "A backbone with LightNL is at least 1.0 mIoU better", "+ LightNL", "MobileNetV2", 1.0),
    Claim(
        "segmentation",
        "A backbone with LightNL by energy is at least 1.0 mIoU better (asked after the first was missed)",
        *("+ LightNL by energy", "MobileNetV2", 1.0),
    ),
    Claim("segmentation", "LightNL by energy brings more than as published", "+ LightNL by energy", "+ LightNL"),
)

TUNING = """
Rows named "held out" trained on nine tenths of the training images and were judged by the last tenth. The others, by a
mistake that a review found later, were judged by the validation images: the recipe had first been chosen by those.
"""

SEARCH = """
Five random networks were planned. Their spread left the difference open, so fifteen were settled on before any other
was trained (commit ab74d8f). A validation loss is NaN in the CSV where outputs for some of the images are infinite:
{nan}. Counted with their weights on a CPU, it is 2 and 4 of the 5,000 images in two of the networks found with trials
at 64 px. Such images count as wrong.

Of the {n} random networks, top-1 is correlated by {lightnl} with the number of LightNL blocks, of which they have
{fewest} to {most}, by {blocks} with that of all blocks and by {se} with that of SE blocks (95 % intervals). At one
budget LightNL is paid for with blocks, kernels and expansion.

**Why LightNL in the space is not shown to help.** How far networks that were searched with LightNL are ahead of those
without, means of three each, by how much of the schedule is over:

{course}

- Searches with LightNL end with networks that fit the training images better: {fit} in training loss at the end of the
  30 epochs at 96 px. LightNL does not seem to be what does it: with it taken out, the same networks fit as well
  ({fit_out}) and score as well. It is then what else these searches chose.
- Longer schedule: twice the epochs bring both three points, and the difference stays where it was.
- Larger maps: at 128 px, where the networks were not searched, the difference is the largest, and still not shown. With
  runs that spread like these, {needed} searches a side would show one point.
- Larger ratio: all channels in the affinity in place of what the searches chose change nothing that shows.
- LightNL by energy in place of what they were found with does not either. As published it is nearly switched off in the
  one network with swish that was looked at (see "Does LightNL reach an ordinary image?"), and the searches chose its
  places while it was. What would tell is a search with LightNL by energy, which was not run."""

SEGMENTATION = """
Three seeds were planned and gave +0.83 mIoU with two standard errors of 1.29: not shown. Those with LightNL spread by
two points, so five were settled on, as in the first table, before any other was trained (commit 9fc9dc2). LightNL by
energy was asked for with one seed (ac237b6), and with three when that had come out well (d72934d). A backbone is
trained anew where its run folder is gone: same job, same seed, but not always the run of the first table.

What LightNL brings while a training goes on, as the difference to the run without it and with the same seed, by how
much of the schedule is over:

{course}

(The curves of the first three seeds were not kept.) With LightNL every run fits the training images better. Three of
these four pairs have a large lead on the validation images early and a small one at the end. There are 1,464 images to
learn from, and over 120 epochs validation losses rise while training losses fall.

What was tried, one run of each but by energy, so that a difference of a point or less says nothing:

- A longer schedule: twice the epochs bring more than LightNL does, and {longer} mIoU between the two.
- Larger maps: backbones that were trained at 128 px are better, with LightNL and without, and {larger} between the
  two.
- A larger ratio: with all channels in the affinity in place of a quarter {ratio} against the same seed without
  LightNL.
- LightNL by energy, three seeds: see the claims. The largest validation loss of a run with LightNL as published stands
  far above all others; by energy none does."""
