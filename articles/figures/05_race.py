"""Three draws as a picture: each position has its own race, and its own noise.

python articles/figures/05_race.py      # writes 05_race.svg beside this file, from the embedded model
"""

import matplotlib.pyplot as plt
from drawing import bare, save

from engine.cache.single import CachedForward
from engine.decoding.noise import exponential_noise
from engine.decoding.params import SamplingParams
from engine.decoding.sampling import distribution, draw
from engine.decoding.sampling_state import SamplingState
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

PROMPT, SEED, POSITIONS = "Lily opened the box and found a", 9, 3
LANES = 8  # of the first to arrive
KNOBS = SamplingParams(temperature=1.5, min_p=0.02)
RED, BLUE = "#b91c1c", "#2563eb"


def main() -> None:
    tokenizer = Tokenizer.from_pretrained("storyteller")
    forward, ids = CachedForward(load_model("storyteller")), tokenizer.encode(PROMPT)
    figure, axes = plt.subplots(POSITIONS, 1, figsize=(9, 6), sharex=True)
    for position, ax in enumerate(axes):
        probs = distribution(forward(ids)[None], [SamplingState(KNOBS, [], [], SEED)])  # [1, V]
        noise = exponential_noise([SEED], [position], probs.shape[1], probs.device)  # [1, V]
        drawn = int(draw(probs, [SEED], [position]))
        runners = probs[0].nonzero()[:, 0]
        runners = runners[(noise / probs)[0, runners].argsort()][:LANES].tolist()
        for lane, token in enumerate(runners):
            arrival, share = float(noise[0, token] / probs[0, token]), float(probs[0, token])
            colour = RED if token == drawn else BLUE
            ax.plot([0.02, arrival], [-lane, -lane], color=colour, lw=0.6 + 12 * share, solid_capstyle="butt")
            ax.text(
                arrival * 1.06,
                -lane,
                tokenizer.decode([token]).strip(),
                va="center",
                color=colour,
                fontsize=8,
            )
        told = tokenizer.decode(ids)[len("Lily opened the box and ") :]
        title = f"… {told} …   (seed {SEED}, position {position})"
        ax.set_title(title, loc="left", fontsize=10, weight="bold", pad=2)
        ax.set(xscale="log", xlim=(0.02, 200), ylim=(0.6 - LANES, 0.6), yticks=[])
        bare(ax, "left")
        ids.append(drawn)
    axes[-1].set_xlabel("arrival = noise / probability (thick: likely); the first one is drawn")
    figure.tight_layout()
    save(figure, __file__, tight=False)


if __name__ == "__main__":
    main()
