"""Where clients train. An engine has one method: ``train(t, s, cohort) -> (mean upload, receipts)``."""
