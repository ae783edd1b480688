"""nbgrader: solutions/ is what instructors write, exercises/ what learners get."""

from manyranks.grade import autograde
from manyranks.world.strangers.scratch import colored

c = get_config()  # noqa: F821  nbgrader provides it

c.CourseDirectory.course_id = "manyranks"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "feedback", "mistakes.py"]  # learners get no answers
c.ClearSolutions.code_stub = {"python": "raise NotImplementedError  # your code here"}
c.OverwriteCells.add_missing_cells = True  # a check that a learner has deleted
c.ExecutePreprocessor.timeout = 60  # seconds a cell; a check ends within 20
c.Autograde.sanitize_preprocessors = autograde.first_steps()  # one submission does not stop the others
c.Autograde.autograde_preprocessors = autograde.steps()  # a test cell that ends without its points is worth none
c.HTMLExporter.filters = {"highlight_code": colored, "round": autograde.rounded}  # learners do not choose who colors their code
c.GenerateFeedback.preprocessors.append(autograde.Legible)
c.ExportApp.plugin_class = "manyranks.grade.autograde.Export"
