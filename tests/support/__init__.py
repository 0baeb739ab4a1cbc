"""What all folders of tests share: brokers and jobs in processes, and how they are started."""
