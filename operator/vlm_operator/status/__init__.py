"""Computes conditions, the whole status and Events of one turn. Pure.

inputs.py      inputs from one turn                                  StatusInputs, Failure
causes.py      why pods do not serve: table of causes, fixes         POD_CAUSES, Problem
model.py       whether the model is in its claim                     model_ready
progress.py    whether the service makes progress                    Progress, update_progress
readiness.py   readiness of roles, with the blocking cause           examined
conditions.py  all conditions, in reading order                      condition_states
build.py       the whole status, rounded, and when it is written     build_status, WritePacing
refused.py     refused manifests, deletions, VLMPools without a service
classes.py     the status of a VLMNodeClass                          class_status
events.py      transitions that become Events                        events
"""
