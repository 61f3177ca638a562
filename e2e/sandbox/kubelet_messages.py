"""The few messages of the kubelet's device-plugin (v1beta1) and pod-resources (v1) APIs, described at run time.

Field numbers are those of k8s.io/kubelet/pkg/apis/{deviceplugin/v1beta1,podresources/v1}/api.proto; fields not
needed here are left out, which protobuf allows.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Kind = descriptor_pb2.FieldDescriptorProto
# message -> field -> (number, type, repeated); a type that isn't a scalar's name is a message of the same package
Fields = Mapping[str, tuple[int, str, bool]]
SCALARS = {"string": Kind.TYPE_STRING, "bool": Kind.TYPE_BOOL}

DEVICE_PLUGIN: Mapping[str, Fields] = {
    "Empty": {},
    "DevicePluginOptions": {"pre_start_required": (1, "bool", False)},
    "RegisterRequest": {
        "version": (1, "string", False),
        "endpoint": (2, "string", False),
        "resource_name": (3, "string", False),
        "options": (4, "DevicePluginOptions", False),
    },
    "Device": {"ID": (1, "string", False), "health": (2, "string", False)},
    "ListAndWatchResponse": {"devices": (1, "Device", True)},
    "ContainerAllocateRequest": {"devices_ids": (1, "string", True)},
    "AllocateRequest": {"container_requests": (1, "ContainerAllocateRequest", True)},
    # a map<string, string> is, on the wire, a repeated message of key 1 and value 2
    "Variable": {"key": (1, "string", False), "value": (2, "string", False)},
    "ContainerAllocateResponse": {"envs": (1, "Variable", True)},
    "AllocateResponse": {"container_responses": (1, "ContainerAllocateResponse", True)},
}
POD_RESOURCES: Mapping[str, Fields] = {
    "ListPodResourcesRequest": {},
    "ContainerDevices": {"resource_name": (1, "string", False), "device_ids": (2, "string", True)},
    "ContainerResources": {"name": (1, "string", False), "devices": (2, "ContainerDevices", True)},
    "PodResources": {
        "name": (1, "string", False),
        "namespace": (2, "string", False),
        "containers": (3, "ContainerResources", True),
    },
    "ListPodResourcesResponse": {"pod_resources": (1, "PodResources", True)},
}


def messages(package: str, described: Mapping[str, Fields]) -> dict[str, Any]:
    """Message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"sandbox/{package}.proto", package=package, syntax="proto3")
    for name, fields in described.items():
        message = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            entry = message.field.add(name=field, number=number)
            entry.label = Kind.LABEL_REPEATED if repeated else Kind.LABEL_OPTIONAL
            if kind in SCALARS:
                entry.type = SCALARS[kind]
            else:
                entry.type = Kind.TYPE_MESSAGE
                entry.type_name = f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(found[name]) for name in described}
