"""Wrong answers to the task plan of 10_nd_parallel."""

from manyranks import theory
from tests.grading.zoo.wrong import Wrong, keeper

ZOO: list[Wrong] = []
wrong = keeper(ZOO)
TASK = "plan"
JOB = {"seq": 8192, "batch": 128}
GIVEN = "the job is given"
FORM = "it returns a plan"
LITERAL = "the answer is one plan, written down"


def keep(says, name, right_values=True, **fields):
    """A plan with these fields."""

    def answer():
        return theory.Plan(**JOB | fields)

    answer.__name__ = answer.__qualname__ = name
    wrong(TASK, says, right_values)(answer)


keep("that is the baseline itself", "baseline", dp=16, pp=8, tp=8)
keep("that is the baseline itself", "baseline_with_less_states", dp=16, pp=8, tp=8, zero=2)
keep("that is slower than the baseline", "slower_than_it", dp=32, pp=4, tp=8, microbatch=2)
keep("not judged: the plan cannot be", "beyond_all_layers", False, dp=8, pp=128)
keep("not judged: it is another job", "half_the_batch", False, dp=16, pp=8, tp=8, batch=64)
keep("bubble 0.", "says_its_parts", dp=16, pp=8, tp=8, virtual=2)
keep("choose degrees whose product is 1024", "too_few", False, dp=16, pp=4, tp=8)
keep("choose degrees whose product is 1024", "too_many", False, dp=32, pp=8, tp=8)
keep("batch=128 is not a multiple", "too_many_replicas", False, dp=1024)
keep("are parameters, gradients and the optimizer's states", "does_not_fit", False, dp=128, cp=8, zero=1)
keep("are activations", "too_many_activations", False, dp=8, pp=32, tp=4, microbatch=16, flash=False, recompute="none")
keep("runs each layer's forward again", "all_again", dp=64, pp=2, cp=2, tp=4, virtual=8, recompute="full")
keep("tp=16 is larger than a node of 8", "across_nodes", dp=64, tp=16)
keep("the bubble takes", "long_pipeline", dp=8, pp=16, tp=8)
keep("tensor parallelism's messages take", "much_tensor", dp=64, pp=2, tp=8, virtual=8)
keep("gradients and parameters take", "stage_3", dp=128, tp=8, zero=3)
keep("gradients and parameters take", "only_stage_3_and_context", dp=128, cp=8, zero=3)
keep("context parallelism's messages take", "much_context", dp=8, cp=32, pp=4, virtual=4)
keep(GIVEN, "another_batch", False, dp=64, pp=2, cp=2, tp=4, virtual=8, recompute="none", batch=2048)
keep(GIVEN, "shorter", False, dp=64, pp=2, cp=2, tp=4, virtual=8, recompute="none", seq=4096)
keep(GIVEN, "eight_bits", False, dp=64, pp=2, cp=2, tp=4, virtual=8, recompute="none", precision="fp8")
keep("80 layers of llama3-70b on 128 stages", "too_many_stages", False, dp=16, pp=8, tp=8, virtual=16)
keep("does not divide the 64 heads", "odd_heads", False, dp=1, pp=1, tp=1024)
keep("the closed form holds for multiples", "too_few_micro_batches", False, dp=64, pp=4, tp=4, virtual=5)


@wrong(TASK, FORM)
def a_dict():
    return {"dp": 64, "pp": 2, "cp": 2, "tp": 4}


@wrong(TASK, FORM)
def nothing():
    theory.Plan(**JOB)


@wrong(TASK, LITERAL)
def searched():
    cluster = theory.clusters["h100-dgx"].of(1024)
    return theory.planner.search(theory.models["llama3-70b"], cluster, 1024, **JOB)[0].plan


@wrong(TASK, LITERAL)
def tried():
    shape, cluster = theory.models["llama3-70b"], theory.clusters["h100-dgx"].of(1024)
    plans = [theory.Plan(dp=128 // cp, cp=cp, tp=8, **JOB) for cp in (1, 2)]
    return min(plans, key=lambda plan: theory.step.estimate(shape, plan, cluster).seconds)


@wrong(TASK, "a Plan says what cannot be")
def no_degree():
    return theory.Plan(dp=0, **JOB)


@wrong(TASK, "help(theory.Plan) names its fields")
def no_field():
    return theory.Plan(gpus=1024, **JOB)


@wrong(TASK, LITERAL)
def asked_the_grader():
    from manyranks.grade.nd import planning

    return planning.best()


@wrong(TASK, LITERAL)
def asked_the_rules():
    cluster = theory.clusters["h100-dgx"]
    return theory.nd.rules.rule_of_thumb(theory.models["llama3-70b"], cluster, 1024, 8192, 128)
