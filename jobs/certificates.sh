#!/usr/bin/env bash
# Makes what a Ray cluster needs to speak TLS: an authority, and a key and certificate for each machine.
#
#   jobs/certificates.sh ca
#   jobs/certificates.sh node ADDRESS [ADDRESS or NAME …]
#
# The first is done once, on a machine that keeps the authority's key to itself: who has that key can let anybody in.
# The second makes a folder TLS/nodes/ADDRESS for one machine, valid for all its addresses on the network that the
# cluster uses, and for itself; its three files belong into ~/.ray/tls of that machine, where the scripts find them.
# Machines that only submit jobs need none: the dashboard speaks HTTP, through ssh.
#   TLS   folder of the authority (default ~/.ray/tls)
#   DAYS  how long a machine's certificate is valid (default 825)
set -euo pipefail
script=$(basename "$0")
tls=${TLS:-$HOME/.ray/tls}
umask 077

fail() {
  echo "$script: $1" >&2
  exit 2
}

make_key() {
  openssl ecparam -name prime256v1 -genkey -noout -out "$1" 2>/dev/null || fail "openssl could not make the key $1"
}

case ${1:-} in
ca)
  [[ ! -e $tls/ca.key ]] || fail "there is an authority in $tls; certificates of a new one would not fit the old ones"
  mkdir -p "$tls"
  make_key "$tls/ca.key"
  openssl req -x509 -new -key "$tls/ca.key" -days 3650 -out "$tls/ca.crt" -config <(
    printf '%s\n' '[req]' 'distinguished_name=name' 'x509_extensions=is' 'prompt=no' '[name]' 'CN=ray_diloco cluster' \
      '[is]' 'basicConstraints=critical,CA:TRUE,pathlen:0' 'keyUsage=critical,keyCertSign,cRLSign' \
      'subjectKeyIdentifier=hash'
  )
  echo "the authority is in $tls; keep ca.key there, it goes to no other machine"
  ;;
node)
  shift
  (($# >= 1)) || fail "the machine's address is missing; usage: jobs/certificates.sh node ADDRESS …"
  [[ -r $tls/ca.key ]] || fail "no authority in $tls; make it once with jobs/certificates.sh ca"
  names=IP:127.0.0.1,DNS:localhost
  for name in "$@"; do
    [[ $name =~ ^[A-Za-z0-9.:-]+$ ]] || fail "'$name' is no address"
    [[ $name =~ ^[0-9.]+$|: ]] && names+=,IP:$name || names+=,DNS:$name
  done
  node=$tls/nodes/$1
  mkdir -p "$node"
  make_key "$node/node.key"
  openssl req -new -key "$node/node.key" -subj "/CN=$1" |
    openssl x509 -req -CA "$tls/ca.crt" -CAkey "$tls/ca.key" -set_serial "0x$(openssl rand -hex 16)" \
      -days "${DAYS:-825}" -out "$node/node.crt" -extfile <(
      printf '%s\n' 'basicConstraints=critical,CA:FALSE' 'keyUsage=critical,digitalSignature' \
        'extendedKeyUsage=serverAuth,clientAuth' "subjectAltName=$names" 'authorityKeyIdentifier=keyid'
    ) 2>/dev/null || fail "openssl could not make a certificate for $names"
  cp "$tls/ca.crt" "$node/ca.crt"
  echo "$node is for ~/.ray/tls of that machine: scp $node/* $1:.ray/tls/"
  ;;
*) fail "usage: jobs/certificates.sh ca | node ADDRESS …" ;;
esac
