"""Reports of a run for CI services: step summary, annotations, Markdown and JUnit files."""
