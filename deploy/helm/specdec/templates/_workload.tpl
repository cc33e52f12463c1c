{{- /* Changes the manifest of a service by the values of its role. The nodes of one target have one role. */ -}}
{{- define "specdec.workload" -}}
{{- $name := index .manifest.metadata.labels "app.kubernetes.io/component" }}
{{- $role := trimSuffix "-node" $name }}
{{- $values := index .Values $role }}
{{- $pod := .manifest.spec.template.spec }}
{{- $container := index $pod.containers 0 }}
{{- $image := splitList ":" $container.image | first }}
{{- $_ := set $container "image" (printf "%s%s:%v" .Values.image.registry $image .Values.image.tag) }}
{{- if and (eq $name $role) (not (kindIs "invalid" $values.replicas)) }}
{{- $_ := set .manifest.spec "replicas" $values.replicas }}
{{- end }}
{{- with $values.resources }}{{ $_ := set $container "resources" . }}{{ end }}
{{- with $values.nodeSelector }}{{ $_ := set $pod "nodeSelector" . }}{{ end }}
{{- with $values.tolerations }}{{ $_ := set $pod "tolerations" . }}{{ end }}
{{- $env := dict }}
{{- with $values.model }}{{ $_ := set $env "SPECDEC_MODEL" . }}{{ end }}
{{- if eq $role "orchestrator" }}
{{- with .Values.target.model }}{{ $_ := set $env "SPECDEC_TOKENIZER" . }}{{ end }}
{{- end }}
{{- with $values.head }}{{ $_ := set $env "SPECDEC_HEAD" . }}{{ end }}
{{- if gt (int (default 1 $values.tensorParallel)) 1 }}
{{- $_ := set $env "SPECDEC_ENGINE" "vllm" }}
{{- $_ := set $env "SPECDEC_VLLM__TENSOR_PARALLEL_SIZE" $values.tensorParallel }}
{{- $_ := set $container "resources" (deepCopy (default dict $container.resources)) }}
{{- $_ := set $container.resources "limits" (merge (dict "nvidia.com/gpu" $values.tensorParallel) (default dict $container.resources.limits)) }}
{{- /* Processes of one node speak through it. It counts as memory of the pod. */ -}}
{{- $shm := dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" "8Gi") }}
{{- $_ := set $pod "volumes" (append $pod.volumes $shm) }}
{{- $_ := set $container "volumeMounts" (append $container.volumeMounts (dict "name" "shm" "mountPath" "/dev/shm")) }}
{{- end }}
{{- $env = merge (deepCopy $values.env) $env }}
{{- $variables := list }}
{{- range $container.env }}
{{- if not (hasKey $env .name) }}{{ $variables = append $variables . }}{{ end }}
{{- end }}
{{- range $variable, $value := $env }}
{{- $variables = append $variables (dict "name" $variable "value" (toString $value)) }}
{{- end }}
{{- $_ := set $container "env" $variables }}
{{- end }}
