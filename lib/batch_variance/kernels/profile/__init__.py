"""What bounds the kernels: recorded points read again under Nsight Compute, by hardware counters.

``python -m batch_variance.kernels.profile --out FOLDER`` or ``batch-variance bench profile``. One process of the tool
runs every case; what the counters mean is read in ``studies.profile``.
"""
