"""Codebooks of GGUF's IQ types: a few bits of a block select an entry of neighbouring weights."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

_GO_ON = 255
"""Marker in a list of gaps: add this and the next byte."""
_SIZES: Mapping[str, tuple[int, int]] = {
    "IQ2_XXS": (3, 8),
    "IQ2_XS": (3, 8),
    "IQ2_S": (3, 8),
    "IQ3_XXS": (8, 4),
    "IQ3_S": (8, 4),
    "IQ1_S": (3, 8),
}
"""Number of weight magnitudes, and weights per entry."""
# An entry is a number whose digits, lowest first, are the indices of the weights' sizes. Numbers ascend and are stored
# as differences.
_GAPS: Mapping[str, str] = {
    "IQ2_XXS": (
        "c-kdTL2AQ53@l<18zD>(%d(hdF=h$I1Y=ANrudLU2*rmIaws|GB|Y{5eM{fc?<Cq*hmn{WG13eC6@n><MkizoXsW~vl50RJDl2m7l>-VONs5"
        "<?--j^MS$$Sm_mIWXNRx`}`lhW;fD&tS8uoyGYhkh@T$HQ2=<b2X&%=K(TB9K%(VAd`rG%Wfo|dbUX6g;ijfNs*4E1onKv;J@VY4jnC?R!o%"
        "H{)xuU|kHBlGdCd?C4My_4Pbw(9+Z?_MWIx1arY>(hFFY{n;%BpCw"
    ),
    "IQ2_XS": (
        "c-mc%!D_=W42Fj=LI`7w5GD*0f+-=45K1XIj2?Q}X^fr6PCM<mXW1i9PS-4}!M3oZU!VUw*eti+xSS67FL`-Fv@MsA0bL-yX#&UF3Z@Jg9OU"
        "L##-WLLAqyp=3XYC%BydTt65=6PEV8>kIq+z*GW)c*p6E5X>FME0T6?4(7&|SEwM3XRcRrqMIwuW}zVW?-|Lj+~&14tJQUT`G52J~I9!I8xQ"
        "!ODXtTyR&V^FTvz_C448WI-5Jq}$WAE{)9uciu-SNIHV3@_rwx8vblsB8^L3!5<Z_VtJhWss=tq<zMi7!rLHB(5VvY&1Wsx_iWP599mLpSoR"
        "TrfI@r^qOTie5;y&d&C(g=;IGd78#)"
    ),
    "IQ2_S": (
        "c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s(v1b{Ofw;)l5ecGzfFpcr"
        "Gw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85(q+qs7Rf}2t!WkbcRdE_su-?a^f*^J_%|3YF+P4b"
        "09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$O{&AX3f0W*$UJaV_nXH;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&TobK53l?U|K?"
        "4mZ#z^>~y*k+!9GT;z*5_&T)VvnXa8$;{ruIEM+exG)j1forhPTGY=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ710T&F)7KfH"
    ),
    "IQ3_XXS": (
        "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv*cdV0O)CtUZJ2G"
        "E2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU"
        "1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE"
    ),
    "IQ3_S": (
        "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5QRnqP#h<ZksOlW"
        "I2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_"
        "#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8"
        "*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlcSv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W"
    ),
    "IQ1_S": (
        "c-n1M*Mi$H3@e8yd1Umx|Nor@NGW!%)#YqagA<^CDTg(6ZJ|1H!iNh)l@?Bc)Bd&JA{v(QGvn*PW<<El3ojKJSWt+9xz^Z>Pl!)HmFi7gaoC"
        "SbtKUtiH;EyJ$%*4}w{CD6BgI|vq^7fCINL0yQ7i?#;D9g&48Ivj%cvY)({reVqvp-hTRgCfRV(+g!-Y>In6=a>b5UwCqs{o!p4T?CiYYhYw"
        "+=sjL^)UcNW%W4Xgy7*9`|9TW9wb}42KzW+ba`HK&9dm5pNfd@{)0)QlAq0T|$XsRH&HXqS?vfRTi<jGyWX71VgwhEW+4tHQKWR%%s6ICy^I"
        "$L)KOrZucsmUW(st07<4I6Q<K~KyQ{0YUIcwL6iH|_Bd^eRfTzo$HHV~)aRRd%+zD&lUZs;&aSJLl_Z?$OxgkzdYjOX3<%o!m&dZMg@!~YtH"
        "og6tUb1$dlZI}B3^bw3BJVq#LM(bKVm7(o3Y|>>L-`x#@3QJn?%L7NG0_@pXmsf5&Lph?vP#9<TG@cw<Xv*sT02Iw3*yT5hQ2kyhL_n<h_-5"
        "rKcpn>J;&B=!TIiF|4~d6ITYaR=u1$6TIP*lJ-bKA#HFJgn)%eI+Mh}+93|4+XKjZk?86dlT#nM%<@ycdXqjEf;4S*%q=e?z6O9#>QsWj-Nk"
        "oPdm*%>0w{xy7L$)AGI8!k9c)%Ej|mj9-mRKg5lntGy~3iGN#ruv1Fr*UqnGeN%j_hvquWNpsNzlrT%AnEvzjnmV_mF8Psmk=B)TIzeEC4LB"
        "UWqGegEO$<3@6nFp|(imhX#kd^agTkL1jZEynZ;)zza?I(*F9;D-&~iiw~CjOhPxq`ody4+At?f{92D#NsRnfwZ%!dcs&X`aCXlEQhOoSTP("
        "uaN9<GUQUAe@l~bkgO>D^mljRYD-D&w$JBo|#ovfNY<(=^&&<MX1hLq!Z-!w*lOzUgyCm`^XpS%I11&uUn}{CmaUJ=1`xnWK8KD"
    ),
}


@cache
def codebook(name: str, sizes: Sequence[int]) -> npt.NDArray[np.int8]:
    """Entries of a codebook, [entries, 8 or 4]. sizes: magnitudes that the digits stand for."""
    base, width = _SIZES[name]
    gaps = np.frombuffer(zlib.decompress(base64.b85decode(_GAPS[name])), dtype=np.uint8)
    numbers = np.cumsum(gaps, dtype=np.int64)[gaps != _GO_ON]
    digits = numbers[:, None] // base ** np.arange(width) % base
    return np.array(sizes, dtype=np.int8)[digits]


def words(name: str, sizes: Sequence[int]) -> npt.NDArray[Any]:
    """Entries as words of 64 or 32 bits, [entries]."""
    entries = codebook(name, sizes)
    return entries.view("<u8" if entries.shape[1] == 8 else "<u4")[:, 0]
