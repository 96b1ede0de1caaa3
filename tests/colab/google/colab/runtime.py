"""runtime.unassign, which gives the machine back."""


def unassign() -> None:
    print("the machine is given back")
