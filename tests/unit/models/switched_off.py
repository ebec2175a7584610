"""Whether a model notices that a protection is switched off: it is run on fixed draws."""

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

MOST = 3000  # sequences; it ends at the first that fails


def is_noticed(machine, *, most=MOST, steps=25):
    """Whether something that must hold does not, in so many sequences."""
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=most,
                stateful_step_count=steps,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],  # one that fails is enough: it need not be short
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                print_blob=False,
            ),
        )
    except Exception as error:
        print(f"noticed: {type(error).__name__}: {error}")
        return True
    return False
