"""What tests read in the answers of ``outlast plan``."""


def by_model(answer):
    """Each model's row."""
    return {row["model"]: row for row in answer["models"]}
