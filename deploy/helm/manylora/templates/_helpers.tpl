{{- define "manylora.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- /* Of a component: (dict "root" $ "component" "router" "pool" "") */ -}}
{{- define "manylora.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
manylora/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "manylora.labels" -}}
{{ include "manylora.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "manylora.image" -}}
image: {{ printf "%s-%s:%s" .root.Values.images.prefix .component (default .root.Chart.AppVersion .root.Values.images.tag) }}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
{{- end }}

{{- define "manylora.tlsSecret" -}}
{{- if eq .Values.tls.source "secret" }}{{ required "tls.secretName: which Secret has ca.crt, tls.crt and tls.key" .Values.tls.secretName }}{{ else }}{{ include "manylora.fullname" . }}-tls{{ end }}
{{- end }}

{{- define "manylora.etcdEndpoints" -}}
{{- if .Values.etcd.own }}{{ include "manylora.fullname" . }}-etcd.{{ .Release.Namespace }}.svc:2379{{ else }}{{ required "etcd.endpoints: where etcd is, host:port" (join "," .Values.etcd.endpoints) }}{{ end }}
{{- end }}

{{- /* The names of the certificate. Pods are dialled by their names below a headless service. */ -}}
{{- define "manylora.hosts" -}}
{{- $root := . }}
{{- $name := include "manylora.fullname" . }}
{{- $services := list $name (printf "%s-etcd" $name) }}
{{- $wild := list (printf "%s-router" $name) (printf "%s-scheduler" $name) }}
{{- range $pool, $_ := .Values.pools }}{{ $wild = append $wild (printf "%s-worker-%s" $name $pool) }}{{ end }}
{{- $hosts := list "localhost" }}
{{- range $services }}{{ $hosts = concat $hosts (list . (printf "%s.%s" . $root.Release.Namespace) (printf "%s.%s.svc" . $root.Release.Namespace)) }}{{ end }}
{{- range $wild }}{{ $hosts = append $hosts (printf "*.%s.%s.svc" . $root.Release.Namespace) }}{{ end }}
{{- toJson (concat $hosts .Values.tls.hosts) }}
{{- end }}

{{- /* Settings that all services have. */ -}}
{{- define "manylora.flags" -}}
- --etcd={{ include "manylora.etcdEndpoints" . }}
- --peer-secret-file=/run/manylora/peer/peer.secret
- --metrics-listen=0.0.0.0:9464
{{- if eq .Values.tls.source "none" }}
- --allow-plain-text
{{- else }}
- --tls-cert=/run/manylora/tls/tls.crt
- --tls-key=/run/manylora/tls/tls.key
- --tls-ca=/run/manylora/tls/ca.crt
{{- end }}
{{- if and (not .Values.etcd.own) .Values.etcd.tlsSecret }}
- --etcd-tls-ca=/run/manylora/etcd-tls/ca.crt
{{- if .Values.etcd.clientCertificate }}
- --etcd-tls-cert=/run/manylora/etcd-tls/tls.crt
- --etcd-tls-key=/run/manylora/etcd-tls/tls.key
{{- end }}
{{- else if ne .Values.tls.source "none" }}
- --etcd-tls-ca=/run/manylora/tls/ca.crt
- --etcd-tls-cert=/run/manylora/tls/tls.crt
- --etcd-tls-key=/run/manylora/tls/tls.key
{{- end }}
{{- if and (not .Values.etcd.own) .Values.etcd.loginSecret }}
- --etcd-login-file=/run/manylora/etcd-login/login
{{- end }}
{{- end }}

{{- define "manylora.storeFlags" -}}
{{- if .Values.adapterStore.bucket }}
- --adapter-store={{ .Values.adapterStore.bucket }}
{{- with .Values.adapterStore.accessSecret }}
- --adapter-store-access=/run/manylora/adapter-store/access.yaml
{{- end }}
{{- else }}
- --adapter-store=/var/lib/manylora/adapters
{{- end }}
{{- end }}

{{- define "manylora.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: peer, mountPath: /run/manylora/peer, readOnly: true}
{{- if ne .Values.tls.source "none" }}
- {name: tls, mountPath: /run/manylora/tls, readOnly: true}
{{- end }}
{{- if not .Values.etcd.own }}
{{- if .Values.etcd.tlsSecret }}
- {name: etcd-tls, mountPath: /run/manylora/etcd-tls, readOnly: true}
{{- end }}
{{- if .Values.etcd.loginSecret }}
- {name: etcd-login, mountPath: /run/manylora/etcd-login, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- define "manylora.volumes" -}}
- {name: tmp, emptyDir: {}}
- name: peer
  secret:
    secretName: {{ default (printf "%s-peer" (include "manylora.fullname" .)) .Values.secrets.peer.name }}
    defaultMode: 0440
    items: [{key: {{ .Values.secrets.peer.key }}, path: peer.secret}]
{{- if ne .Values.tls.source "none" }}
- {name: tls, secret: {secretName: {{ include "manylora.tlsSecret" . }}, defaultMode: 0440}}
{{- end }}
{{- if not .Values.etcd.own }}
{{- with .Values.etcd.tlsSecret }}
- {name: etcd-tls, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.etcd.loginSecret }}
- {name: etcd-login, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- end }}

{{- define "manylora.storeMounts" -}}
{{- if .Values.adapterStore.bucket }}
{{- if .Values.adapterStore.accessSecret }}
- {name: adapter-store, mountPath: /run/manylora/adapter-store, readOnly: true}
{{- end }}
{{- else }}
- {name: adapters, mountPath: /var/lib/manylora/adapters}
{{- end }}
{{- end }}

{{- define "manylora.storeVolumes" -}}
{{- if .Values.adapterStore.bucket }}
{{- with .Values.adapterStore.accessSecret }}
- {name: adapter-store, secret: {secretName: {{ . }}, defaultMode: 0440}}
{{- end }}
{{- else }}
- {name: adapters, persistentVolumeClaim: {claimName: {{ default (printf "%s-adapters" (include "manylora.fullname" .)) .Values.adapterStore.claim }}}}
{{- end }}
{{- end }}

{{- /* Where a pool's model is: (dict "pool" NAME "settings" ...) */ -}}
{{- define "manylora.modelFolder" -}}
{{- if .settings.model.folder }}{{ .settings.model.folder }}{{ else if .settings.model.volume }}/var/lib/manylora/models/{{ .pool }}{{ else }}{{ fail (printf "pools.%s.model.volume: which volume has the model's folder (or model.folder, of one in the image)" .pool) }}{{ end }}
{{- end }}

{{- /* Asks a port by gRPC. TLS makes it a command, since the kubelet shows no certificate: (dict "root" $ "port" 7072 "more" list) */ -}}
{{- define "manylora.grpcProbe" -}}
{{- if and (eq .root.Values.tls.source "none") (not .more) }}
grpc: {port: {{ .port }}}
{{- else }}
exec:
  command:
    - python
    - -m
    - manylora_shared.process.healthcheck
    {{- if ne .root.Values.tls.source "none" }}
    - --tls-cert=/run/manylora/tls/tls.crt
    - --tls-key=/run/manylora/tls/tls.key
    - --tls-ca=/run/manylora/tls/ca.crt
    {{- end }}
    {{- range .more }}
    - {{ . }}
    {{- end }}
    - localhost:{{ .port }}
{{- end }}
{{- end }}

{{- /* What every pod has. */ -}}
{{- define "manylora.pod" -}}
serviceAccountName: {{ include "manylora.fullname" .root }}
automountServiceAccountToken: false
enableServiceLinks: false  # its variables MANYLORA_... would be taken for settings
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .settings.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .settings.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .settings.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- $selector := include "manylora.selector" . | fromYaml }}
{{- $spread := .settings.topologySpread | default (list (dict "maxSkew" 1 "topologyKey" "kubernetes.io/hostname" "whenUnsatisfiable" "ScheduleAnyway")) }}
topologySpreadConstraints:
{{- range $spread }}
  - {{ toJson (merge (dict "labelSelector" (dict "matchLabels" $selector)) .) }}
{{- end }}
{{- end }}

{{- define "manylora.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "manylora.env" -}}
env:
  - {name: HOME, value: /tmp}
  - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- range .env }}
  - {{ toJson . }}
{{- end }}
{{- with .envFrom }}
envFrom: {{ toJson . }}
{{- end }}
{{- end }}

{{- /* The pools, each with all its settings. */ -}}
{{- define "manylora.pools" -}}
{{- $pools := dict }}
{{- range $pool, $settings := .Values.pools }}{{ $_ := set $pools $pool (mergeOverwrite (deepCopy $.Values.poolDefaults) $settings) }}{{ end }}
{{- toJson $pools }}
{{- end }}
