"""Identities of pods: one certificate per service and role, and the operator's own CA.

schedule.py      when a certificate or a CA is issued, renewed and dropped. Pure
certificates.py  X.509: CAs and leaves
authority.py     the CA's Secret in the operator's namespace
keeper.py        the Secrets, or cert-manager's Certificates, of one service
"""
