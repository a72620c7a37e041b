"""Chapter 11: what to think about again, by the mistake that was seen."""

from labkit.exercise import Idea

__all__ = ["IDEAS"]

IDEAS = {
    "form": Idea(
        first="The function returns two things: x in FP8, and the scale that it was multiplied by.",
        further='The last line can be `return x_fp8, scale`, with `x_fp8 = (...).to(recipe["dtype"])` of the shape '
        "of x.",
    ),
    "scale": Idea(
        first="The scale stretches the largest number that was seen to the end of the format: fp8_max / amax.",
        further="Print, at the end of a step, the amax that you chose and the scale that follows; the next step uses"
        " it.",
    ),
    "current": Idea(
        first="Delayed scaling reads a tensor once: when it casts, it does not know this tensor's amax yet.",
        further="Cast first, by the scale in `state`. Afterwards take the amax, and put the next step's scale into "
        "`state`.",
    ),
    "state": Idea(
        first="`state` is the same dict in every step: what you put into it is there in the next one.",
        further='Begin with `scale = state.get("scale", 1.0)` and end with `state["scale"] = ...`.',
    ),
    "window": Idea(
        first="The rule 'max' looks at the last `history` steps, the one that has just run among them; 'most_recent'"
        " at that one alone.",
        further="Follow an outlier: it decides the scales of exactly `history` steps after its own. A list helps: "
        "append the new amax, then keep the last `history` of them.",
    ),
    "group": Idea(
        first="Ranks that see other samples have other amaxes; with scales of their own they would no longer agree.",
        further="The amax of all ranks is the largest of theirs: one all_reduce with `op=dist.ReduceOp.MAX`, in the "
        "group that you are given, before the amax goes into the history.",
    ),
    "traffic": Idea(
        first="How many numbers does a rank have to send so that all know the largest amax?",
        further="Take the amax of your own tensor first, and all_reduce that one number.",
    ),
    "margin": Idea(
        first="A margin leaves room above the amax: each unit of it halves the scale.",
        further="Divide by 2 ** margin.",
    ),
    "scaled": Idea(
        first="The history is about x as it comes, whatever scale it is cast by.",
        further="Take `x.abs().max()` of the argument itself; if x was overwritten on the way, give the product "
        "another name.",
    ),
    "signed": Idea(
        first="The a in amax is for absolute: both ends of a tensor have to fit into the format.",
        further="Take `.abs()` before `.max()`.",
    ),
    "edges": Idea(
        first="fp8_max / 0 is infinite and fp8_max / infinity is 0: neither is of use for the next tensor.",
        further="Compute a new scale only where 0 < amax < infinity, which is false for NaN too; else leave the one "
        "that there is. An infinite quotient becomes the largest float32 number, "
        "torch.finfo(torch.float32).max.",
    ),
    "inverse": Idea(
        first="x is multiplied by the scale before the cast; its inverse brings the numbers back.",
        further="Return fp8_max / amax itself.",
    ),
    "saturate": Idea(
        first="An outlier outgrows a scale that was made for the steps before it.",
        further="Clamp to -fp8_max ... fp8_max before the cast: a cast alone gives infinity or NaN in some formats.",
    ),
    "cast": Idea(
        first="The order is: multiply by the scale, clamp, cast.",
        further="Print x, x * scale and x_fp8.float() of one number. Is the scale that you return the one you used?",
    ),
    "raised": Idea(
        first="`state` is empty in the first step, and x may have any shape.",
        further="Call it on one rank with a small tensor and an empty dict, and read the line that raised.",
    ),
    "timeout": Idea(
        first="A collective is a meeting: every member of the group calls it, in every step.",
        further="Look for a collective behind an `if` that not all members take, and for one in another group.",
    ),
    "lost": Idea(
        first="The process of a rank ended.",
        further="Try the function on a tensor of few numbers first; does something call exit, or take all the memory?",
    ),
    "unsolved": Idea(
        first="Nothing is written yet.",
        further="Begin without history and group: cast by the scale in `state`, then set fp8_max / amax for the next"
        " step.",
    ),
    "missing": Idea(
        first="The grader looks for a function of this very name.",
        further="Run the cell that defines delayed_cast.",
    ),
}
