"""A dead rank costs some iterations, not the job: what a job that torchrun restarted resumes from."""
