"""nbgrader: solutions/ is what instructors write, exercises/ what learners get."""

c = get_config()  # noqa: F821  nbgrader provides it

c.CourseDirectory.course_id = "manyranks"
c.CourseDirectory.source_directory = "solutions"
c.CourseDirectory.release_directory = "exercises"
c.CourseDirectory.db_assignments = []
c.ClearSolutions.code_stub = {"python": "raise NotImplementedError  # your code here"}
c.ExecutePreprocessor.timeout = 180
